// Connects VS Code to tilelang-lsp. It needs no package besides VS Code's own API, so that it is packaged without network.
'use strict';
const vscode = require('vscode');
const { spawn } = require('child_process');

const SCHEME = 'tilelang';
const SELECTOR = { language: 'python' };

// JSON-RPC over the standard input and output of a process.
class Connection {
  constructor(command, onNotification, onExit) {
    this.pending = new Map();
    this.number = 0;
    this.data = Buffer.alloc(0);
    this.onNotification = onNotification;
    this.process = spawn(command[0], command.slice(1), { stdio: ['pipe', 'pipe', 'ignore'] });
    this.process.stdout.on('data', (chunk) => this.read(chunk));
    this.process.on('error', onExit);
    this.process.on('exit', (code) => onExit(code ? new Error(`exit status ${code}`) : undefined));
    this.process.stdin.on('error', () => {});
  }

  send(message) {
    const body = Buffer.from(JSON.stringify({ jsonrpc: '2.0', ...message }));
    this.process.stdin.write(`Content-Length: ${body.length}\r\n\r\n`);
    this.process.stdin.write(body);
  }

  notify(method, params) { this.send({ method, params }); }

  request(method, params) {
    const id = ++this.number;
    this.send({ id, method, params });
    return new Promise((resolve, reject) => this.pending.set(id, { resolve, reject }));
  }

  read(chunk) {
    this.data = Buffer.concat([this.data, chunk]);
    for (;;) {
      const end = this.data.indexOf('\r\n\r\n');
      if (end < 0) return;
      const length = Number(/Content-Length: (\d+)/i.exec(this.data.subarray(0, end).toString())[1]);
      if (this.data.length < end + 4 + length) return;
      const message = JSON.parse(this.data.subarray(end + 4, end + 4 + length).toString());
      this.data = this.data.subarray(end + 4 + length);
      this.take(message);
    }
  }

  take(message) {
    if (message.method) {
      this.onNotification(message.method, message.params);
      if (message.id !== undefined) this.send({ id: message.id, result: null }); // a request of the server
      return;
    }
    const waiting = this.pending.get(message.id);
    this.pending.delete(message.id);
    if (waiting && message.error) waiting.reject(new Error(message.error.message));
    else if (waiting) waiting.resolve(message.result);
  }
}

const range = (r) => new vscode.Range(r.start.line, r.start.character, r.end.line, r.end.character);
const at = (document, position) => ({
  textDocument: { uri: document.uri.toString() },
  position: { line: position.line, character: position.character },
});
const markdown = (text) => new vscode.MarkdownString(text);

class Client {
  constructor(context) {
    this.context = context;
    this.diagnostics = vscode.languages.createDiagnosticCollection(SCHEME);
    this.hintsChanged = new vscode.EventEmitter();
    this.pages = new Map();
    context.subscriptions.push(this.diagnostics, this.hintsChanged);
  }

  async start() {
    const settings = vscode.workspace.getConfiguration('tilelang');
    this.connection = new Connection(settings.get('command'), (m, p) => this.notified(m, p), (e) => {
      if (e) vscode.window.showWarningMessage(`TileLang: the language server ended (${e.message}). pip install 'tilelang-py[lsp]', or set tilelang.command.`);
    });
    await this.connection.request('initialize', {
      processId: process.pid, rootUri: null, initializationOptions: { seconds: settings.get('seconds') },
      capabilities: { workspace: { inlayHint: { refreshSupport: true } } },
    });
    this.connection.notify('initialized', {});
    vscode.workspace.textDocuments.forEach((d) => this.opened(d));
  }

  stop() {
    if (this.connection) this.connection.process.kill();
  }

  notified(method, params) {
    if (method === 'textDocument/publishDiagnostics') {
      this.diagnostics.set(vscode.Uri.parse(params.uri), params.diagnostics.map((d) => {
        const shown = new vscode.Diagnostic(range(d.range), d.message, d.severity - 1);
        shown.code = d.code;
        shown.source = d.source;
        shown.relatedInformation = (d.relatedInformation || []).map((r) => new vscode.DiagnosticRelatedInformation(
          new vscode.Location(vscode.Uri.parse(r.location.uri), range(r.location.range)), r.message));
        return shown;
      }));
    } else if (method === 'workspace/inlayHint/refresh') {
      this.hintsChanged.fire();
    }
  }

  opened(d) {
    if (d.languageId === 'python' && d.uri.scheme !== SCHEME) {
      this.connection.notify('textDocument/didOpen', {
        textDocument: { uri: d.uri.toString(), languageId: 'python', version: d.version, text: d.getText() } });
    }
  }

  changed(d) {
    if (d.languageId === 'python') {
      this.connection.notify('textDocument/didChange', {
        textDocument: { uri: d.uri.toString(), version: d.version }, contentChanges: [{ text: d.getText() }] });
    }
  }

  closed(d) {
    if (d.languageId === 'python') this.connection.notify('textDocument/didClose', { textDocument: { uri: d.uri.toString() } });
  }

  async completion(document, position) {
    const list = await this.connection.request('textDocument/completion', at(document, position));
    return list.items.map((i) => {
      const item = new vscode.CompletionItem({ label: i.label, detail: i.labelDetails && i.labelDetails.detail }, i.kind - 1);
      item.documentation = markdown(i.documentation.value);
      return item;
    });
  }

  async signature(document, position) {
    const found = await this.connection.request('textDocument/signatureHelp', at(document, position));
    if (!found) return undefined;
    const help = new vscode.SignatureHelp();
    help.signatures = found.signatures.map((s) => new vscode.SignatureInformation(s.label, markdown(s.documentation.value)));
    return help;
  }

  async hover(document, position) {
    const found = await this.connection.request('textDocument/hover', at(document, position));
    return found && new vscode.Hover(markdown(found.contents.value));
  }

  async hints(document, where) {
    const found = await this.connection.request('textDocument/inlayHint', {
      textDocument: { uri: document.uri.toString() }, range: { start: where.start, end: where.end } });
    return (found || []).map((h) => {
      const hint = new vscode.InlayHint(new vscode.Position(h.position.line, h.position.character), h.label);
      hint.paddingLeft = true;
      return hint;
    });
  }

  async definition(document, position) {
    const found = await this.connection.request('textDocument/definition', at(document, position));
    return found && new vscode.Location(vscode.Uri.parse(found.uri), range(found.range));
  }

  async actions(document, where) {
    const found = await this.connection.request('textDocument/codeAction', {
      textDocument: { uri: document.uri.toString() }, range: { start: where.start, end: where.end }, context: { diagnostics: [] } });
    return found.map((a) => {
      const action = new vscode.CodeAction(a.title, vscode.CodeActionKind.Empty);
      action.command = { title: a.title, command: 'tilelang.page', arguments: a.command.arguments };
      return action;
    });
  }

  // A page beside the file: the tile program, the generated code or the report.
  async page(...args) {
    const page = await this.connection.request('workspace/executeCommand', { command: 'tilelang.show', arguments: args });
    const uri = vscode.Uri.from({ scheme: SCHEME, path: `/${page.title}` });
    this.pages.set(uri.toString(), page.text);
    const document = await vscode.workspace.openTextDocument(uri);
    await vscode.languages.setTextDocumentLanguage(document, page.language).then(undefined, () => document);
    await vscode.window.showTextDocument(document, { viewColumn: vscode.ViewColumn.Beside, preview: true, preserveFocus: true });
  }
}

let client;

async function activate(context) {
  client = new Client(context);
  const on = vscode.languages;
  await client.start();
  context.subscriptions.push(
    vscode.workspace.onDidOpenTextDocument((d) => client.opened(d)),
    vscode.workspace.onDidChangeTextDocument((e) => client.changed(e.document)),
    vscode.workspace.onDidCloseTextDocument((d) => client.closed(d)),
    vscode.workspace.registerTextDocumentContentProvider(SCHEME, { provideTextDocumentContent: (uri) => client.pages.get(uri.toString()) }),
    on.registerCompletionItemProvider(SELECTOR, { provideCompletionItems: (d, p) => client.completion(d, p) }, '.'),
    on.registerSignatureHelpProvider(SELECTOR, { provideSignatureHelp: (d, p) => client.signature(d, p) }, '(', ','),
    on.registerHoverProvider(SELECTOR, { provideHover: (d, p) => client.hover(d, p) }),
    on.registerInlayHintsProvider(SELECTOR, {
      onDidChangeInlayHints: client.hintsChanged.event, provideInlayHints: (d, r) => client.hints(d, r) }),
    on.registerDefinitionProvider(SELECTOR, { provideDefinition: (d, p) => client.definition(d, p) }),
    on.registerCodeActionsProvider(SELECTOR, { provideCodeActions: (d, r) => client.actions(d, r) }),
    vscode.commands.registerCommand('tilelang.page', (...args) => client.page(...args)),
    vscode.commands.registerCommand('tilelang.restart', async () => { client.stop(); await client.start(); }),
  );
}

function deactivate() {
  if (client) client.stop();
}

module.exports = { activate, deactivate, Connection };
