"""What was said in the Responses API can be named by a later request."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from moe_infinity.server.kept import KeptTexts, ResponseTurn
from moe_infinity.server.responses_body import ResponsesBody
from tests.server.serving import serving

GREEDY = {"temperature": 0, "max_output_tokens": 6}


def ask(server, key: str = "", **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = f"{server.url}/v1/responses"
    return httpx.post(url, json=GREEDY | body, headers=headers, timeout=60)


def said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["output"][0]["content"][0]["text"]


def tokens_of(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["input_tokens"]


@pytest.fixture
def first(server) -> dict[str, Any]:
    return ask(server, input=[said("w5 w6")]).json()


def test_an_item_that_is_named_is_as_if_it_were_sent(server, first):
    (item,) = first["output"]
    more = said("w9")
    whole = ask(server, input=[said("w5 w6"), item, more])
    named = {"type": "item_reference", "id": item["id"]}
    for reference in (named, {"id": item["id"]}):
        answer = ask(server, input=[said("w5 w6"), reference, more])
        assert (tokens_of(answer), text_of(answer)) == (tokens_of(whole), text_of(whole))


@pytest.mark.parametrize("more", ["w9", [said("w9")]])
def test_an_answer_that_is_named_brings_all_that_was_before_it(server, first, more):
    second = ask(server, input=more, previous_response_id=first["id"])
    third = ask(server, input="w7", previous_response_id=second.json()["id"])
    assert third.json()["previous_response_id"] == second.json()["id"]
    conversation = [
        *(said("w5 w6"), *first["output"]),
        *(said("w9"), *second.json()["output"]),
        said("w7"),
    ]
    whole = ask(server, input=conversation)
    assert (tokens_of(third), text_of(third)) == (tokens_of(whole), text_of(whole))
    counted = httpx.post(
        f"{server.url}/v1/responses/input_tokens",
        json={"input": more, "previous_response_id": first["id"]},
        timeout=60,
    )
    assert counted.json()["input_tokens"] == tokens_of(second)


def test_instructions_are_of_one_request_only(server):
    first = ask(server, input="w5", instructions="w8 w8 w8")
    second = ask(server, input="w9", previous_response_id=first.json()["id"])
    whole = ask(server, input=[said("w5"), *first.json()["output"], said("w9")])
    assert tokens_of(second) == tokens_of(whole)


def test_an_answer_of_a_stream_is_kept_too(server):
    body = GREEDY | {"input": "w5", "stream": True}
    events = httpx.post(f"{server.url}/v1/responses", json=body, timeout=60).text
    id_ = events.partition('"id": "')[2].partition('"')[0]
    assert ask(server, input="w9", previous_response_id=id_).status_code == 200


def test_a_call_that_is_named_gets_its_result():
    """Also where ids of calls are those of the model, which come again in each conversation."""
    kept = KeptTexts()
    call = {"type": "function_call", "id": "fc_1", "call_id": "functions.w88:0", "name": "w88"}
    result = {"type": "function_call_output", "call_id": "functions.w88:0", "output": "w7"}
    first = ResponseTurn(kept, "", store=True, max_bytes=10_000)
    first.whole(ResponsesBody.model_validate({"input": "w5"}))
    first.end({"id": "resp_1", "output": [call]})
    whole = ResponsesBody.model_validate({"input": [said("w5"), call, result]}).for_chat()
    by_answer = {"input": [result], "previous_response_id": "resp_1"}
    by_item = {"input": [said("w5"), {"type": "item_reference", "id": "fc_1"}, result]}
    for body in (by_answer, by_item):
        turn = ResponseTurn(kept, "", store=False, max_bytes=10_000)
        named = turn.whole(ResponsesBody.model_validate(body)).for_chat()
        assert [m.for_template() for m in named.messages] == [
            m.for_template() for m in whole.messages
        ]


def test_nothing_is_kept_where_the_client_says_so(server):
    first = ask(server, input="w5", store=False).json()
    assert first["store"] is False
    answer = ask(server, input="w9", previous_response_id=first["id"])
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "previous_response_not_found")
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    error = ask(server, input=[reference, said("w9")]).json()["error"]
    assert error["param"] == "input"
    assert "send the whole conversation" in error["message"]


def test_what_one_key_said_is_not_there_for_another(moe):
    with serving(moe, api_key=["one", "two"]) as server:
        first = ask(server, "one", input="w5").json()
        for key, status in (("one", 200), ("two", 400)):
            answer = ask(server, key, input="w9", previous_response_id=first["id"])
            assert answer.status_code == status


def test_a_conversation_that_is_named_is_no_larger_than_a_body(moe):
    with serving(moe, max_body=1000) as server:
        first = ask(server, input="w5 " * 150).json()
        second = ask(server, input="w5 " * 150, previous_response_id=first["id"])
        answer = ask(server, input="w9", previous_response_id=second.json()["id"])
    assert (answer.status_code, answer.json()["error"]["param"]) == (413, "previous_response_id")


@pytest.mark.parametrize(
    ("num_bytes", "store", "keeps"), [(9, True, True), (9, False, False), (0, True, False)]
)
def test_an_answer_says_whether_it_is_kept(num_bytes, store, keeps):
    """Behind --replicas nothing is: the next request may come to another."""
    assert ResponseTurn(KeptTexts(num_bytes), "", store=store, max_bytes=9).keeps is keeps


# getting and deleting them


def responses_of(server, key: str = "none") -> Any:
    return server.client(api_key=key).responses


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_can_be_got_again_until_it_is_deleted(server, is_stream):
    responses = responses_of(server)
    response = responses.create(model="tiny", input="w5 w6", max_output_tokens=6, stream=is_stream)
    if is_stream:
        *_, last = response
        response = last.response
    assert responses.retrieve(response.id).to_dict() == response.to_dict()
    assert responses.delete(response.id) is None
    for gone in (responses.retrieve, responses.delete, responses.input_items.list):
        with pytest.raises(openai.NotFoundError) as raised:
            gone(response.id)
        message = f"Response with id '{response.id}' not found."
        nothing = {"type": "invalid_request_error", "param": None, "code": None}
        assert raised.value.body == nothing | {"message": message}
    answer = ask(server, input="w9", previous_response_id=response.id)
    assert answer.json()["error"]["code"] == "previous_response_not_found"
    reference = {"type": "item_reference", "id": response.output[0].id}
    assert ask(server, input=[reference, said("w9")]).status_code == 400


def test_deleting_says_so(server, first):
    answer = httpx.delete(f"{server.url}/v1/responses/{first['id']}")
    expected = {"id": first["id"], "object": "response", "deleted": True}
    assert (answer.status_code, answer.json()) == (200, expected)


def test_what_an_answer_was_made_from_is_listed_in_pages(server, first):
    call = {"type": "function_call", "call_id": "c1", "name": "w88", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "w7"}
    other = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    asked = [call, result, other, reference, {"role": "assistant", "content": "w8"}, said("w9")]
    second = ask(server, input=asked, previous_response_id=first["id"]).json()
    list_of = responses_of(server).input_items.list
    items = [item.model_dump(exclude_none=True) for item in list_of(second["id"], order="asc")]
    texts = [[part["text"] for part in item.get("content", ())] for item in items]
    answered = [part["text"] for part in first["output"][0]["content"]]
    assert texts == [["w5 w6"], answered, [], [], answered, ["w8"], ["w9"]]
    assert [item["type"] for item in items[2:4]] == ["function_call", "function_call_output"]
    assert len({item["id"] for item in items}) == 6  # one of them is there twice
    assert {item["status"] for item in items} <= {"completed", "incomplete"}
    page = list_of(second["id"], limit=2)  # the last come first
    assert [item.content[0].text for item in page.data] == ["w9", "w8"]
    assert (page.first_id, page.last_id, page.has_more) == (page.data[0].id, page.data[1].id, True)
    last = list_of(second["id"], after=items[0]["id"])
    assert (last.data, last.first_id, last.has_more) == ([], None, False)


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("?stream=true", "stream"),
        ("/input_items?after=x", "after"),
        ("/input_items?limit=0", "limit"),
    ],
)
def test_what_cannot_be_listed_or_followed_is_refused(server, first, path, param):
    answer = httpx.get(f"{server.url}/v1/responses/{first['id']}{path}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_another_key_neither_gets_nor_deletes_an_answer(moe):
    with serving(moe, api_key=["one", "two"]) as server:
        first = ask(server, "one", input="w5").json()
        other = responses_of(server, "two")
        for use in (other.retrieve, other.delete, other.input_items.list):
            with pytest.raises(openai.NotFoundError):
                use(first["id"])
        assert responses_of(server, "one").retrieve(first["id"]).id == first["id"]
        assert httpx.get(f"{server.url}/v1/responses/{first['id']}").status_code == 401


def test_an_id_of_another_kind_is_not_kept(server, first):
    item_id = first["output"][0]["id"]
    answer = ask(server, input="w9", previous_response_id=item_id)
    assert answer.json()["error"]["code"] == "previous_response_not_found"
    reference = {"type": "item_reference", "id": first["id"]}
    assert ask(server, input=[reference, said("w9")]).status_code == 400
    assert httpx.get(f"{server.url}/v1/responses/{item_id}").status_code == 404


def test_texts_leave_in_the_order_of_their_last_use():
    kept = KeptTexts(10)
    kept.put("a", "1", "xxxx")
    kept.put("a", "2", "xxxx")
    kept.put("a", "2", "yyyyyy")  # in place of the one before
    assert kept.get("a", "1") == "xxxx"
    kept.put("a", "3", "z")
    assert [kept.get("a", each) for each in "123"] == ["xxxx", None, "z"]
    assert kept.get("b", "1") is None
    kept.put("a", "4", "x" * 11)  # more than there is room for
    assert [kept.get("a", each) for each in "134"] == [None, None, None]
