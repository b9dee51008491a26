"""An HTTP server that takes and answers what vLLM's does, as far as the router sees it, and fails when told.

A token is a byte of the prompt, an answer is a function of the prompt's tokens; so an answer that came by token ids is
the same as one that came by text, and `tokenized` tells which it was.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer


class FakeVLLM:
    """One instance.

    Attributes:
        name: Tells answers apart.
        requests: Bodies as they came.
        headers: Of the same requests.
        tokenized: How often a prompt was tokenized.
        status: Answers that to every request, if it is not 200.
        healthy: What /health says; None: it does not answer.
        garbage: Answers with something that is not JSON.
        die_before_body: Closes the connection before the first byte of an answer's body.
        die_after: Closes the connection after so many chunks of a stream.
        gate: An answer, and each further chunk of a stream, waits for it.
        arrived: Set when a request has come in.
        cancelled: Requests whose client went away.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.tokenized = 0
        self.status = 200
        self.healthy: bool | None = True
        self.garbage = False
        self.die_before_body = False
        self.die_after: int | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.arrived = asyncio.Event()
        self.cancelled = 0
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_post("/v1/completions", self._generate)
        self._server = TestServer(app)

    async def start(self) -> FakeVLLM:
        await self._server.start_server()
        return self

    async def stop(self) -> None:
        self.gate.set()
        await self._server.close()

    @property
    def url(self) -> str:
        return str(self._server.make_url("")).rstrip("/")

    async def _health(self, _request: web.Request) -> web.Response:
        if self.healthy is None:
            await asyncio.Event().wait()
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        self.headers.append(request.headers)
        return web.json_response({"object": "list", "data": [{"id": self.name}]}, status=self.status)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(request.headers)
        self.arrived.set()
        try:
            return await self._answer(request, body)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.status != 200:
            return web.json_response({"error": {"message": f"{self.name} says {self.status}"}}, status=self.status)
        if not body.get("stream"):
            await self.gate.wait()
        if self.garbage:
            return web.Response(body=b"\xffnonsense", content_type="application/json")
        if self.die_before_body and not body.get("stream"):
            _close(request)
        prompts = self._prompts(request, body)
        params = body.get("kv_transfer_params") or {}
        handover = {"do_remote_prefill": True, "prompt_token_ids": prompts[0], "kvstore.tokens": len(prompts[0])}
        if body.get("stream"):
            return await self._stream(request, prompts)
        tell = bool(body.get("return_token_ids"))
        chat = request.path.endswith("chat/completions")
        answer: dict[str, Any] = {
            "id": f"cmpl-{self.name}",
            "choices": [_choice(index, ids, chat, tell) for index, ids in enumerate(prompts)],
            "kv_transfer_params": handover if params.get("do_remote_decode") else None,
        }
        if chat:
            answer["prompt_token_ids"] = prompts[0] if tell else None
        return web.json_response(answer, headers={"X-Instance": self.name})

    async def _stream(self, request: web.Request, prompts: list[list[int]]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        if self.die_before_body:
            _close(request)
        for number, word in enumerate(answer_of(prompts[0]).split()):
            if number == self.die_after:
                _close(request)
            if number:
                await self.gate.wait()
            chunk = {"choices": [{"index": 0, "delta": {"content": f"{word} "}}]}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    def _prompts(self, request: web.Request, body: dict[str, Any]) -> list[list[int]]:
        if request.path.endswith("chat/completions"):
            ids = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
            return [ids if ids is not None else self._tokenize(json.dumps(body["messages"]))]
        prompt = body.get("prompt") or "none"
        prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
        return [self._tokenize(each) if isinstance(each, str) else each for each in prompts]

    def _tokenize(self, text: str) -> list[int]:
        self.tokenized += 1
        return list(text.encode())


def answer_of(ids: list[int]) -> str:
    """Several words."""
    return " ".join(f"{(sum(ids) * (number + 1)) % 997}" for number in range(4))


def _choice(index: int, ids: list[int], chat: bool, tell: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "finish_reason": "stop"}
    if chat:
        return {**choice, "message": {"role": "assistant", "content": answer_of(ids)}}
    return {**choice, "text": answer_of(ids), "prompt_token_ids": ids if tell else None}


def _close(request: web.Request) -> None:
    """As by SIGKILL: no end of the answer, no goodbye."""
    assert request.transport is not None
    request.transport.abort()
    raise ConnectionResetError
