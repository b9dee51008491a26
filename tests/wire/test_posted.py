"""Calls over gRPC whose answers nobody needs: they take effect in order all the same."""

from __future__ import annotations

import threading
from concurrent import futures

import grpc

from kvstore.calls import GrpcCalls
from kvstore.wire.v1 import engine_pb2


def test_what_is_posted_together_takes_effect_in_order() -> None:
    may_answer = threading.Event()
    begun: list[str] = []

    def release(request: bytes, context: grpc.ServicerContext) -> bytes:
        begun.append("Release")
        assert may_answer.wait(30)
        return b""

    def commit(request: bytes, context: grpc.ServicerContext) -> bytes:
        begun.append("Commit")
        return b""

    handlers = {
        name: grpc.unary_unary_rpc_method_handler(call) for name, call in (("Release", release), ("Commit", commit))
    }
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("kvstore.v1.Engine", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        calls = GrpcCalls(channel, "here")
        both = [("Release", engine_pb2.ReleaseRequest()), ("Commit", engine_pb2.CommitRequest())]
        poster = threading.Thread(target=calls.post, args=(both, 30.0))
        poster.start()
        poster.join(0.2)  # the second one is not sent before the first one is answered
        assert poster.is_alive() and "Commit" not in begun
        may_answer.set()
        poster.join(30)
        assert not poster.is_alive()
        calls.call("Commit", engine_pb2.CommitRequest(), 30.0)
    server.stop(None)
    assert begun == ["Release", "Commit", "Commit"]
