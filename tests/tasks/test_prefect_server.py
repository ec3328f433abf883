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
