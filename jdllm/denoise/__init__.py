"""One denoising step over a packed batch of unlike rows, as one compiled function. Read in this order: ``state`` (what
a row is), ``window`` (which positions are computed), ``blocks`` (block arithmetic), ``unmask`` (what is committed),
``step`` (all of it together). Nothing here knows requests, tokenizers or schedulers."""
