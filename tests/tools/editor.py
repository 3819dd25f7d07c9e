"""An editor in a few lines: starts the language server, opens texts, waits for what it publishes; and texts to open."""

import asyncio
import sys
import threading
import time

from lsprotocol import types as lsp
from pygls.lsp.client import LanguageClient

HEAD = "import tilelang\nimport tilelang.language as T\n\n\n"
MACRO = '''@T.macro
def scale(tile, factor):
    for i, j in T.Parallel(64, 64):
        tile[i, j] *= factor


'''
MATMUL = '''@tilelang.jit
def matmul(A, B, BK: int = 32):
    M, N, K = T.const("M N K")
    A: T.Tensor((M, K), "float16")
    B: T.Tensor((K, N), "float16")
    C = T.empty((M, N), "float16")
    with T.Kernel(T.ceildiv(N, 64), T.ceildiv(M, 64), threads=128) as (bx, by):
        As = T.alloc_shared((64, BK), "float16")
        Bs = T.alloc_shared((BK, 64), "float16")
        acc = T.alloc_fragment((64, 64), "float32")
        T.clear(acc)
        for k in T.Pipelined(T.ceildiv(K, BK), num_stages=3):
            T.copy(A[by * 64, k * BK], As)
            T.copy(B[k * BK, bx * 64], Bs)
            T.gemm(As, Bs, acc)
        scale(acc, 0.5)
        T.copy(acc, C[by * 64, bx * 64])
    return C
'''
LONG = HEAD + MACRO + "\n\n".join(MATMUL.replace("matmul", f"matmul_{k}") for k in range(10))  # 200 lines


class Editor:
    def __init__(self, folder, seconds=1.0):
        self.folder, self.published, self.refreshes, self.versions = folder, {}, 0, {}
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.client = LanguageClient("test", "1")

        @self.client.feature(lsp.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)
        def published(params):
            self.published.setdefault(params.uri, []).append((time.perf_counter(), params.diagnostics))

        @self.client.feature(lsp.WORKSPACE_INLAY_HINT_REFRESH)
        def refreshed(params):
            self.refreshes += 1

        self.do(self.client.start_io(sys.executable, "-m", "tilelang.tools.lsp.server", cwd=str(folder)))
        able = lsp.ClientCapabilities(workspace=lsp.WorkspaceClientCapabilities(
            inlay_hint=lsp.InlayHintWorkspaceClientCapabilities(refresh_support=True)))
        self.about = self.do(self.client.initialize_async(lsp.InitializeParams(
            able, root_uri=folder.as_uri(), initialization_options={"seconds": seconds})))
        self.client.initialized(lsp.InitializedParams())

    def ask(self, method, params):
        """The answer to a request."""
        return self.do(getattr(self.client, f"{method}_async")(params))

    def do(self, coroutine, seconds=60):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(seconds)

    def open(self, name, text):
        uri = (self.folder / name).as_uri()
        self.tell(self.client.text_document_did_open, lsp.DidOpenTextDocumentParams(
            lsp.TextDocumentItem(uri, "python", 1, text)))
        self.versions[uri] = 1
        return uri

    def change(self, uri, text):
        """Replace the text; returns when that was."""
        self.versions[uri] += 1
        start = time.perf_counter()
        self.tell(self.client.text_document_did_change, lsp.DidChangeTextDocumentParams(
            lsp.VersionedTextDocumentIdentifier(self.versions[uri], uri), [lsp.TextDocumentContentChangeWholeDocument(text)]))
        return start

    def tell(self, notify, params):
        self.loop.call_soon_threadsafe(notify, params)

    def wait(self, uri, wanted=lambda found: True, seconds=60.0, after=0.0):
        """(time, diagnostics) of the first ones, published after a time, that are wanted."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for at, found in list(self.published.get(uri, [])):
                if at > after and wanted(found):
                    return at, found
            time.sleep(0.002)
        raise AssertionError(f"nothing like that was published: {self.published.get(uri)}")

    def settled(self, uri, text):
        """Open or change a text and return the diagnostics after its kernels are lowered."""
        before = self.refreshes
        start = self.change(uri, text)
        self.wait(uri, after=start)
        end = time.perf_counter() + 60
        while self.refreshes == before and time.perf_counter() < end:
            time.sleep(0.005)
        return self.published[uri][-1][1]

    def at(self, uri, text, needle, offset=0):
        """A position inside of the first occurrence of a text."""
        k = text.index(needle) + offset
        line = text.count("\n", 0, k)
        return {"text_document": lsp.TextDocumentIdentifier(uri),
                "position": lsp.Position(line, k - (text.rfind("\n", 0, k) + 1))}

    def close(self):
        self.do(self.client.shutdown_async(None))
        self.client.exit(None)
        self.do(self.client.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
