/** The commands, and the DOM event by which the fingerprint widget asks for them. */
import { NotebookPanel } from '@jupyterlab/notebook';

import { ICommandResult, NotebookStamper } from './stamper';

export const COMMANDS = {
  stampAll: 'detllm:stamp-all',
  acceptCell: 'detllm:accept-cell',
  acceptAll: 'detllm:accept-all',
  openPanel: 'detllm:open-panel'
} as const;

export const EVENT = 'detllm:command';
const HELLO = 'detllm:hello';
const VERSION = 1;
const MAX_ID = 64;

/** Run a command that changes references in one notebook; null for any other command. */
export function runIn(
  panel: NotebookPanel,
  stamper: NotebookStamper,
  command: string,
  cellId: string | undefined
): Promise<ICommandResult> | null {
  switch (command) {
    case COMMANDS.stampAll:
      return stamper.promote('new');
    case COMMANDS.acceptAll:
      return stamper.promote('all');
    case COMMANDS.acceptCell:
      return stamper.promote('all', cellId ?? panel.content.activeCell?.model.id ?? '');
    default:
      return null;
  }
}

/** The cell id among a command's arguments; null where it is not usable. */
export function cellIdOf(args: unknown): string | undefined | null {
  const found = typeof args === 'object' && args !== null && 'cellId' in args ? args.cellId : undefined;
  return found === undefined || (typeof found === 'string' && found.length <= MAX_ID) ? found : null;
}

interface IRequest {
  readonly command: string;
  readonly cellId: string | undefined;
  respond(result: ICommandResult): void;
}

/** What the widget asks for, null for anything unexpected. */
function requestOf(event: Event): IRequest | null {
  const detail = event instanceof CustomEvent ? event.detail : null;
  if (typeof detail !== 'object' || detail === null || detail.version !== VERSION) {
    return null;
  }
  const { command, args, respond } = detail;
  const cellId = cellIdOf(args);
  const known = command === HELLO || Object.values(COMMANDS).includes(command);
  if (!known || cellId === null || typeof respond !== 'function') {
    return null;
  }
  return { command, cellId, respond: result => respond(result) };
}

export interface IWidgetHost {
  /** The notebook whose panel contains a node. */
  panelOf(node: Node): NotebookPanel | null;
  stamperOf(panel: NotebookPanel): NotebookStamper;
  openPanel(): void;
}

/** Answer the widget: an event that is taken is prevented, any other is left alone. */
export function listen(host: IWidgetHost): void {
  document.addEventListener(EVENT, event => {
    const request = requestOf(event);
    const [target] = event.composedPath();
    const panel = request && target instanceof Node ? host.panelOf(target) : null;
    if (request === null || panel === null) {
      return;
    }
    event.preventDefault();
    void answer(host, panel, request).then(result => request.respond(result));
  });
}

async function answer(
  host: IWidgetHost,
  panel: NotebookPanel,
  request: IRequest
): Promise<ICommandResult> {
  if (request.command === COMMANDS.openPanel) {
    host.openPanel();
  }
  const done = runIn(panel, host.stamperOf(panel), request.command, request.cellId);
  return done ?? { ok: true, text: 'the JupyterLab extension is here', cells: [] };
}
