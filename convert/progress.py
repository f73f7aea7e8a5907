"""A progress bar on stderr: a line that redraws itself on a terminal, a line every few seconds otherwise."""

import sys
import time


class Progress:
    def __init__(self, total: int):
        self.total = total
        self.live = sys.stderr.isatty()
        self.every = 0.1 if self.live else 5.0
        self.started = self.drawn = time.monotonic()

    def __call__(self, done: int) -> None:
        """Show that ``done`` bytes of the result are written."""
        now, finished = time.monotonic(), done >= self.total
        if not finished and now - self.drawn < self.every:
            return
        self.drawn = now
        share = done / max(self.total, 1)
        text = f"{share:4.0%}  {done / 1e6:,.1f} of {self.total / 1e6:,.1f} MB  {now - self.started:.1f} s"
        if self.live:
            print(f"\r[{'#' * int(30 * share):<30}] {text}", end="\n" if finished else "", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)
