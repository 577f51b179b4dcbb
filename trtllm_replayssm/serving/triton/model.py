"""The model behind ``model.py`` of a Triton repository: one ``LLM`` an instance, fed by all of its requests at once.

Triton calls ``execute`` with requests and gets nothing back: each is answered through its response sender, when its
tokens are there. So a call returns at once, the next one comes, and the scheduler of ``LLM`` batches what is there. An
event loop in a thread of its own lets threads tokenise, waits for the outputs of all requests, and looks now and then
for cancelled ones.
"""

import asyncio
import json
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtllm_replayssm import LLM
from trtllm_replayssm.errors import (
    CapacityError,
    QueueFullError,
    ReplaySSMError,
    RequestError,
    ShutdownError,
    error_text,
)
from trtllm_replayssm.runtime.handle import RequestHandle
from trtllm_replayssm.serving.triton.fields import check_declared
from trtllm_replayssm.serving.triton.metrics import TritonMetrics
from trtllm_replayssm.serving.triton.requests import GenerationRequest, read_request
from trtllm_replayssm.serving.triton.responses import response_tensors
from trtllm_replayssm.serving.triton.settings import ModelSettings

_LOGGER = logging.getLogger(__name__)


class ReplayModel:
    """One instance of a Triton model.

    Args:
        pb_utils: the module ``triton_python_backend_utils``, which exists within Triton alone.
        args: what Triton hands to ``initialize``.

    Raises:
        ReplaySSMError: the folder cannot be opened as ``config.pbtxt`` says; Triton logs it and serves no such model.
    """

    def __init__(self, pb_utils: Any, args: dict[str, str]) -> None:
        self._pb_utils = pb_utils
        config = json.loads(args["model_config"])
        self._is_decoupled = bool(pb_utils.using_decoupled_model_transaction_policy(config))
        check_declared(config)
        parameters = {name: value["string_value"] for name, value in config.get("parameters", {}).items()}
        settings = ModelSettings.from_parameters(parameters)
        version_folder = (Path(args["model_repository"]) / args["model_version"]).resolve()
        self._llm = LLM(**settings.llm_options(version_folder, device_of(args)))
        self._metrics = TritonMetrics(
            pb_utils,
            {"model": args["model_name"], "version": args["model_version"], "instance": args["model_instance_name"]},
        )
        self._period_s = settings.cancellation_check_period_ms / 1000
        self._metrics_period_s = settings.metrics_period_ms / 1000
        self._max_sequences = settings.max_sequences
        self._num_unanswered = 0
        self._open: dict[int, tuple[RequestHandle, Any]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="triton_responses", daemon=True)
        self._thread.start()
        self._log(f"{self._llm!r} serves {args['model_instance_name']}")
        if self._metrics.obstacle is not None:
            self._log(f"no custom metrics: {self._metrics.obstacle}")

    def execute(self, requests: Sequence[Any]) -> None:
        """Take in requests; the answers go through their response senders."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                # Triton lends the input tensors for the time of this call.
                asked = self._read(request)
                wanted = frozenset(request.requested_output_names())
            except Exception as error:  # noqa: BLE001 - it is this request's own, and the others are to be taken in
                self._fail(sender, error)
                continue
            asyncio.run_coroutine_threadsafe(self._answer(sender, asked, wanted), self._loop)

    def is_ready(self) -> bool:
        """Say whether requests are taken; Triton asks where its Python backend knows this function."""
        return self._llm.is_healthy

    def finalize(self) -> None:
        """End all requests and release the memory."""
        self._llm.close()
        asyncio.run_coroutine_threadsafe(self._settle(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        watchers = [self._loop.create_task(self._watch()), self._loop.create_task(self._count())]
        self._loop.run_forever()
        for watcher in watchers:
            watcher.cancel()
        self._loop.run_until_complete(asyncio.gather(*watchers, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def _read(self, request: Any) -> GenerationRequest:
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        parameters = json.loads(request.parameters() or "{}")
        asked = read_request(tensors, parameters, is_decoupled=self._is_decoupled, timeout_us=int(request.timeout()))
        if asked.params.n > self._max_sequences:
            raise RequestError(
                f"num_return_sequences: found {asked.params.n}; needed at most {self._max_sequences}, max_sequences."
            )
        return asked

    async def _answer(self, sender: Any, asked: GenerationRequest, wanted: frozenset[str]) -> None:
        self._num_unanswered += 1
        handle: RequestHandle | None = None
        try:
            # In a thread: a text or a grammar of megabytes takes seconds, and others are not to wait for it.
            handle = await asyncio.to_thread(
                self._llm.generate_async,
                asked.prompt,
                asked.params,
                streaming=asked.streaming,
                timeout_s=asked.timeout_s,
            )
            self._open[handle.request_id] = (handle, sender)
            await self._send_all(sender, handle, asked, wanted)
        except BaseException as error:  # noqa: BLE001 - the client must learn of it, and the other requests go on
            self._fail(sender, error)
        finally:
            if handle is not None:
                handle.abort()
                del self._open[handle.request_id]
            self._num_unanswered -= 1

    async def _send_all(
        self, sender: Any, handle: RequestHandle, asked: GenerationRequest, wanted: frozenset[str]
    ) -> None:
        """Send what is new after every step, or all of it once where the request does not stream."""
        async for output in handle:
            if not output.finished:
                sender.send(self._response(response_tensors(output, asked, wanted)))
        # Not before: an iteration ends with the error of the request, where there is one.
        if any(sequence.finish_reason == "cancelled" for sequence in output.outputs):
            self._end(sender, self._error("request: found it cancelled by its client", "CANCELLED"))
        else:
            self._end(sender, self._response(response_tensors(output, asked, wanted)))

    async def _watch(self) -> None:
        """Abort what clients have given up."""
        while True:
            await asyncio.sleep(self._period_s)
            for handle, sender in list(self._open.values()):
                if sender.is_cancelled():
                    handle.abort()

    async def _count(self) -> None:
        while True:
            self._metrics.update(self._llm.metrics(), self._llm.latencies())
            await asyncio.sleep(self._metrics_period_s)

    async def _settle(self) -> None:
        while self._num_unanswered:
            await asyncio.sleep(0.01)
        self._metrics.update(self._llm.metrics(), self._llm.latencies())

    def _fail(self, sender: Any, error: BaseException) -> None:
        if isinstance(error, ReplaySSMError):
            self._end(sender, self._error(str(error), status_of(error)))
            return
        _LOGGER.error("a request was not answered", exc_info=error)
        self._end(sender, self._error(f"internal error: {type(error).__name__}: {error_text(error)}", "INTERNAL"))

    def _error(self, message: str, status: str) -> Any:
        errors = self._pb_utils.TritonError
        return self._pb_utils.InferenceResponse(error=errors(message, getattr(errors, status)))

    def _response(self, tensors: dict[str, Any]) -> Any:
        return self._pb_utils.InferenceResponse(
            [self._pb_utils.Tensor(name, tensor) for name, tensor in tensors.items()]
        )

    def _end(self, sender: Any, response: Any) -> None:
        sender.send(response, flags=self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _log(self, message: str) -> None:
        self._pb_utils.Logger.log_info(f"trtllm_replayssm: {message}")


def device_of(args: dict[str, str]) -> str:
    """Return the device of an instance as ``LLM`` names it, from the kind of its instance group."""
    return f"cuda:{args['model_instance_device_id']}" if args["model_instance_kind"] == "GPU" else "cpu"


def status_of(error: ReplaySSMError) -> str:
    """Return Triton's status of an error: whose fault it is, and whether to try again."""
    if isinstance(error, QueueFullError | ShutdownError | CapacityError):
        return "UNAVAILABLE"
    return "INVALID_ARG" if isinstance(error, ValueError) else "INTERNAL"
