"""Requests to a Kubernetes API server, with retries, and hints for rejected requests.

All requests may be retried: objects are created under names that are unique to the run, so a second POST after a lost
answer is rejected with 409 instead of creating a second object.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from primus.errors import PrimusError, UnfitError, UsageError
from primus.runtimes.kubernetes.target import Place, RequestRefused
from primus.web.retries import choose_cluster_pause, parse_retry_after, repeat_request

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

CONNECT_S = 5.0
READ_S = 30.0
AGAIN = frozenset((429, 500, 502, 503, 504))
"""Statuses of a busy or unhealthy server."""
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Credentials of a pod."""


def resolve_cluster(
    kubeconfig: str | None, context: str | None, namespace: str | None, environ: Mapping[str, str]
) -> dict[str, str]:
    """Place of the cluster from `kubeconfig`, variables or the home folder; opens no connection.

    Raises:
        UsageError: No cluster is configured.
    """
    typed = kubeconfig or environ.get("KUBECONFIG")
    files = typed or str(Path(environ.get("HOME") or Path.home()) / ".kube" / "config")
    found = [file for file in files.split(":") if file and Path(file).is_file()]
    if found:
        return _read_kubeconfig_files(found, context, namespace)
    if not typed and environ.get("KUBERNETES_SERVICE_HOST") and (ACCOUNT / "token").is_file():
        own = (ACCOUNT / "namespace").read_text().strip() if (ACCOUNT / "namespace").is_file() else "default"
        return {"namespace": namespace or own}
    raise UsageError(
        f"no Kubernetes cluster is configured: {files} does not exist",
        "use --kubeconfig FILE or set KUBECONFIG; for Primus-SaFE use --url; --dry-run needs no cluster",
    )


def _read_kubeconfig_files(files: list[str], context: str | None, namespace: str | None) -> dict[str, str]:
    import yaml

    contexts: dict[str, Any] = {}
    current = context or ""
    for file in files:
        try:
            content = yaml.load(Path(file).read_text(encoding="utf-8"), Loader=yaml.CSafeLoader) or {}
            current = current or content.get("current-context") or ""
            contexts = {each["name"]: each.get("context") or {} for each in content.get("contexts") or ()} | contexts
        except (OSError, ValueError, yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
            mark = getattr(error, "problem_mark", None)  # of a YAML error
            place = f"{file}:{mark.line + 1}" if mark else file
            problem = getattr(error, "problem", None) or getattr(error, "strerror", None) or type(error).__name__
            raise UsageError(f"{place} is not a valid kubeconfig: {problem}", "see kubectl config view") from None
    if current not in contexts:
        problem = f"no context '{current}'" if current else "no current context"
        raise UsageError(f"{':'.join(files)}: {problem}", f"use --context {'|'.join(contexts) or 'NAME'}")
    chosen = namespace or contexts[current].get("namespace") or "default"
    return {
        "kubeconfig": ":".join(str(Path(file).absolute()) for file in files),
        "context": current,
        "namespace": chosen,
    }


class KubernetesClient:
    """Client of an API server, with the account of a kubeconfig or of the pod that it runs in."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._client = _create_api_client(place)
        self._host: str = self._client.configuration.host.rstrip("/")

    @property
    def namespace(self) -> str:
        """Namespace of the jobs."""
        return self._place["namespace"]

    def get_object(self, path: str, **query: str) -> Any:
        """The object at `path`."""
        return self._check_object(self._request_json("GET", path, query=query))

    def list_items(self, path: str, **query: str) -> list[Any]:
        """The objects of the list at `path`."""
        found = self._request_json("GET", path, query=query)
        if not isinstance(found, dict) or not isinstance(found.get("items", ""), list | None):
            raise self._build_foreign_answer_error()
        return [self._check_object(each) for each in found["items"] or ()]

    def create_object(self, path: str, value: Mapping[str, Any]) -> Any:
        """Create an object."""
        return self._request_json("POST", path, body=value)

    def patch_object(self, path: str, value: Mapping[str, Any]) -> Any:
        """Change fields of an object."""
        return self._request_json("PATCH", path, body=value, kind="application/merge-patch+json")

    def delete_object(self, path: str) -> bool:
        """Delete an object and what it owns; gives whether it existed."""
        try:
            self._request_json("DELETE", path, body={"propagationPolicy": "Background"})
        except RequestRefused as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return False
            raise
        return True

    def stream_lines(self, path: str, **query: str) -> Iterator[str]:
        """Lines at `path` as they arrive, until the server or the network closes the connection."""
        from urllib3.exceptions import HTTPError

        # Retried only until the response begins; after that the caller resumes at the last timestamp.
        response = self._request_with_retries("GET", path, None, query, "application/json", is_stream=True)
        rest = b""
        try:
            for piece in response.stream(1 << 16):
                *whole, rest = (rest + piece).split(b"\n")
                yield from (line.decode(errors="replace") + "\n" for line in whole)
        except (HTTPError, OSError):
            return  # the last line may be incomplete; the next call reads it again
        finally:
            response.close()
        if rest:
            yield rest.decode(errors="replace") + "\n"

    def _request_json(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        kind: str = "application/json",
    ) -> Any:
        text = None if body is None else json.dumps(body)
        answer = self._request_with_retries(method, path, text, query or {}, kind)
        try:
            return json.loads(answer.data or b"null")
        except ValueError:
            raise self._build_foreign_answer_error() from None

    def _check_object(self, value: Any) -> Any:
        """`value`, checked to be a Kubernetes object.

        Raises:
            PrimusError: It has no metadata.
        """
        if not isinstance(value, dict) or not isinstance(value.get("metadata"), dict):
            raise self._build_foreign_answer_error()
        return value

    def _build_foreign_answer_error(self) -> PrimusError:
        hint = f"a proxy may have answered; check that this is the right cluster: {self._describe_account()}"
        return PrimusError(f"{self._host}: the response is not from a Kubernetes API server", hint)

    def _request_with_retries(
        self, method: str, path: str, body: str | None, query: Mapping[str, str], kind: str, *, is_stream: bool = False
    ) -> BaseHTTPResponse:
        """Response of a request that has succeeded, after at most five attempts.

        Raises:
            PrimusError: The server cannot be reached.
            RequestRefused: It has rejected the request.
        """
        from urllib3.exceptions import HTTPError, LocationParseError, SSLError

        url = f"{self._host}{path}" + (f"?{urlencode(query)}" if query else "")

        def request() -> BaseHTTPResponse:
            try:
                answer = self._send_request(method, url, body, kind, is_stream)
            # Not transient: a certificate or an address does not change between attempts.
            except (SSLError, LocationParseError) as error:
                raise self._build_unreachable_error(error) from None
            except HTTPError:
                raise
            except ValueError:  # raised by http.client, with the credentials in its message
                reason = "the credentials contain a character that HTTP headers do not allow, such as a line break"
                raise UsageError(f"{self._host}: {reason}", f"log in again ({self._describe_account()})") from None
            if answer.status < HTTPStatus.BAD_REQUEST:
                return answer
            raise self._build_refusal(answer, path)

        def choose_pause(error: Exception, attempt: int) -> float | None:
            is_busy = isinstance(error, RequestRefused) and error.status in AGAIN
            is_transient = is_busy or isinstance(error, HTTPError)
            return choose_cluster_pause(attempt, getattr(error, "asked_s", None)) if is_transient else None

        try:
            return repeat_request(request, choose_pause)
        except HTTPError as error:
            raise self._build_unreachable_error(error) from None

    def _send_request(self, method: str, url: str, body: str | None, kind: str, is_stream: bool) -> BaseHTTPResponse:
        from urllib3 import Timeout

        # Read for every request: a token of an exec plug-in or of the pod expires and is renewed.
        settings = self._client.configuration.auth_settings()
        headers = {each["key"]: each["value"] for each in settings.values() if each.get("in") == "header"}
        answer: BaseHTTPResponse = self._client.rest_client.pool_manager.request(
            method,
            url,
            body=body.encode() if body is not None else None,
            headers={"Accept": "application/json", "Content-Type": kind, **headers},
            timeout=Timeout(connect=CONNECT_S, read=READ_S),
            # `_request_with_retries` retries, with limits that also bound Retry-After.
            retries=False,
            preload_content=not is_stream,
        )
        return answer

    def _build_unreachable_error(self, problem: object) -> PrimusError:
        lead = r"^(HTTPS?Connection(Pool)?\(.*?\): )?(Failed to .*?: (\[Errno -?\d+\] )?)?"  # of urllib3
        reason = re.sub(lead, "", str(problem))
        return PrimusError(
            f"{self._host} cannot be reached: {reason}",
            f"check that this is the right cluster: context {self._describe_account()}",
        )

    def _build_refusal(self, answer: BaseHTTPResponse, path: str) -> RequestRefused:
        """Error with the server's message and a hint. Reading the message returns the connection to the pool."""
        message = _read_error_message(answer.data)
        hints = {
            401: f"your credentials are invalid or have expired: log in again ({self._describe_account()})",
            403: f"your account has no permission: ask for a role, or choose another --namespace "
            f"({self._describe_account()})",
            404: _choose_missing_object_hint(path, message),
            409: "choose another --name, or delete the job that has it",
            422: "the server rejects a field of the job: see its message",
        }
        if answer.status == 403 and "quota" in message:
            hints[403] = "the job asks for more than the quota of the namespace has left: ask for less, or wait"
        problem, asked_s = f"{self._host}: {answer.status} {message}", parse_retry_after(answer.headers)
        return RequestRefused(problem, hints.get(answer.status, ""), answer.status, asked_s)

    def _describe_account(self) -> str:
        place = self._place
        return f"{place['context']} of {place['kubeconfig']}" if "kubeconfig" in place else "the account of this pod"


def _create_api_client(place: Place) -> Any:
    """A client of the `kubernetes` package, which supports all kinds of login in a kubeconfig."""
    try:
        client: Any = importlib.import_module("kubernetes.client")
        config: Any = importlib.import_module("kubernetes.config")
    except ImportError:
        raise UnfitError(
            "the Kubernetes API needs the Python package 'kubernetes'",
            "pip install 'primus[kubernetes]'; or use --dry-run, whose output kubectl accepts",
        ) from None
    try:
        if "kubeconfig" in place:
            return config.new_client_from_config(config_file=place["kubeconfig"], context=place["context"])
        config.load_incluster_config()
        return client.ApiClient()
    except (config.ConfigException, OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{place.get('kubeconfig', ACCOUNT)}: {error}", "see kubectl config view") from None


def _read_error_message(data: bytes | None) -> str:
    """Message of the server."""
    text = (data or b"").decode(errors="replace").strip()
    try:
        status = json.loads(text)
        return str(status.get("message") or status.get("reason") or text)
    except (ValueError, AttributeError):
        return text[:200]


def _choose_missing_object_hint(path: str, message: str) -> str:
    if "namespaces" in message:
        return "the namespace does not exist: choose another one with --namespace"
    is_unknown_kind = "page not found" in message or "could not find the requested resource" in message
    if is_unknown_kind and "jobset.x-k8s.io" in path:
        return "JobSet is not installed in this cluster: install its controller, see jobset.sigs.k8s.io"
    if is_unknown_kind:
        return "Kubeflow Trainer 2 is not installed in this cluster: see www.kubeflow.org/docs/components/trainer"
    return "to list jobs: kubernetes list"
