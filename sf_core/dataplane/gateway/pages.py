"""Explains why a request without a valid key may come from a web page. With a key this does not matter: no
page knows a key."""

from __future__ import annotations

from collections.abc import Mapping

from sf_core.own_addresses import OwnAddresses


def explain_page(headers: Mapping[str, str], own: OwnAddresses) -> str | None:
    """Why the request may come from a page of another site, in one sentence; None if it cannot."""
    if (host := own.find_foreign_host(headers)) is not None:
        return (
            "The data plane answers requests without a valid key only under a loopback name, not under "
            f"{host!r}: send a key, or start the data plane with this host in SF_ALLOWED_HOSTS."
        )
    if (origin := own.find_foreign_origin(headers)) is not None:
        return (
            f"The request comes from a web page of another origin ({origin}) and shows no valid key: send a "
            "key, or start the data plane with the address of the page in SF_ALLOWED_HOSTS."
        )
    media_type = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        return (
            f"A request without a valid key must have the content type application/json, not {media_type!r}: "
            "add the header `content-type: application/json`."
        )
    return None
