import asyncio

import httpx
import pytest
from starlette.responses import PlainTextResponse

from tasks.prefect_server import RetrySoon


def answer(status: int) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(RetrySoon(PlainTextResponse("as it was", status)))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            return await http.get("/")

    return asyncio.run(ask())


def test_a_client_that_met_a_locked_database_is_told_to_ask_again_soon() -> None:
    refused = answer(503)
    assert float(refused.headers["Retry-After"]) <= 0.1
    assert refused.text == "as it was"


@pytest.mark.parametrize("status", [200, 404, 500])
def test_other_answers_stay_as_they_are(status: int) -> None:
    assert "Retry-After" not in answer(status).headers


def test_a_client_that_is_refused_again_and_again_is_told_later_times_until_it_was_not() -> None:
    clock = [100.0]
    app = RetrySoon(PlainTextResponse("as it was", 503), now=lambda: clock[0])

    async def told() -> float:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as http:
            return float((await http.get("/")).headers["Retry-After"])

    waits = []
    # the retries of Prefect's client
    for _ in range(5):
        waits.append(asyncio.run(told()))
        clock[0] += waits[-1]
    assert waits == sorted(waits) and sum(waits) > 5
    for _ in range(50):
        clock[0] += asyncio.run(told())
    assert asyncio.run(told()) == 10.0
    clock[0] += 31
    assert asyncio.run(told()) == 0.1
