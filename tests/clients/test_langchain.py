"""langchain-openai's chat and completion models."""

import asyncio

import openai
import pytest

langchain_openai = pytest.importorskip("langchain_openai")


@pytest.fixture
def chat(server):
    return langchain_openai.ChatOpenAI(model="orders-d2f", base_url=f"{server.url}/v1", api_key="none")


def test_invoke_gives_the_answer_its_reason_and_its_tokens(chat, orders):
    for order in orders:
        message = chat.invoke(order.message)
        assert message.content == order.answer
        assert message.response_metadata["finish_reason"] == "stop"
        assert message.response_metadata["model_name"] == "orders-d2f"
        used = message.usage_metadata
        assert used["input_tokens"] > 0 and used["output_tokens"] > 0
        assert used["total_tokens"] == used["input_tokens"] + used["output_tokens"]


def test_a_stream_adds_up_to_the_same_message(chat, orders):
    chunks = list(chat.stream(orders[3].message))
    assert "".join(chunk.content for chunk in chunks) == orders[3].answer
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.content == orders[3].answer and whole.response_metadata["finish_reason"] == "stop"


def test_a_stream_counts_tokens_where_it_is_asked_to(chat, orders):
    plain = chat.invoke(orders[1].message).usage_metadata
    chunks = list(chat.stream(orders[1].message, stream_usage=True))
    assert [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata] == [plain]


def test_a_batch_is_in_order(chat, orders):
    answers = chat.batch([order.message for order in orders])
    assert [answer.content for answer in answers] == [order.answer for order in orders]


def test_async_calls_give_the_same_answers(chat, orders):
    async def ask() -> tuple[list[str], str]:
        answers = await chat.abatch([order.message for order in orders])
        parts = [chunk.content async for chunk in chat.astream(orders[2].message)]
        return [answer.content for answer in answers], "".join(parts)

    assert asyncio.run(ask()) == ([order.answer for order in orders], orders[2].answer)


def test_max_tokens_and_stop_cut_the_answer(server, chat, orders):
    answer = orders[3].answer
    short = langchain_openai.ChatOpenAI(
        model="orders-d2f", base_url=f"{server.url}/v1", api_key="none", max_tokens=5
    ).invoke(orders[3].message)
    assert short.response_metadata["finish_reason"] == "length" and short.usage_metadata["output_tokens"] == 5
    assert answer.startswith(short.content)
    stopped = chat.invoke(orders[3].message, stop=["items:"])
    assert stopped.content == answer[: answer.index("items:")]


def test_logprobs_come_one_a_token(chat, orders):
    message = chat.bind(logprobs=True).invoke(orders[0].message)
    told = message.response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in told) == orders[0].answer
    assert len(told) == message.usage_metadata["output_tokens"] and all(token["logprob"] <= 0 for token in told)


def test_a_chain_of_prompt_model_and_parser(chat, orders):
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate

    chain = ChatPromptTemplate([("user", "{message}")]) | chat | StrOutputParser()
    assert chain.invoke({"message": orders[2].message}) == orders[2].answer


def test_tools_are_refused_by_name(chat, orders):
    tool = {"name": "look_up", "description": "Looks up.", "parameters": {"type": "object", "properties": {}}}
    with pytest.raises(openai.BadRequestError, match="tools"):
        chat.bind_tools([tool]).invoke(orders[0].message)


def test_the_completion_model_gives_the_same_answers(server, orders, written):
    model = langchain_openai.OpenAI(
        model="orders-d2f", base_url=f"{server.url}/v1", api_key="none", temperature=0, max_tokens=64
    )
    prompts = [written(order.message) for order in orders]
    assert model.batch(prompts) == [order.answer for order in orders]
    assert "".join(model.stream(prompts[3])) == orders[3].answer
