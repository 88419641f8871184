/** Keeps a notebook's references in its metadata. One per document, whatever shows it. */
import { ICellModel, ICodeCellModel } from '@jupyterlab/cells';
import { DocumentRegistry } from '@jupyterlab/docregistry';
import { INotebookModel } from '@jupyterlab/notebook';
import { ISignal, Signal } from '@lumino/signaling';

import { IJsonObject, equal, mapping, own } from './core/canonical';
import { KEY, NotebookError, RUN_KEY, readNotebook } from './core/notebook';
import { IChange, Selection, Update, promote } from './core/promotion';
import { lostOutputs, putBack } from './restore';
import { EMPTY, IStatus, statusOf } from './status';

export type StampPolicy = Update | 'off';

/** How long changes are gathered before they are looked at. */
const DEBOUNCE_MS = 250;
const KEPT_TIMES = 200;
const PLAIN = 'text/plain';

interface IMessage {
  readonly header: { readonly msg_type: string };
  readonly parent_header: unknown;
  readonly content: unknown;
}

type Part = 'source' | 'metadata' | 'outputs';

/** What of a cell decides about its stamp, as JSON, read again only where it changed. */
class Snapshot {
  constructor(readonly cell: ICellModel) {}

  forget(part: Part): void {
    this.stale.add(part);
  }

  /** The same object as long as nothing changed, which is what parsers cache by. */
  json(): IJsonObject {
    if (this.raw === null || this.stale.size) {
      const { cell } = this;
      const parts = { source: this.read('source'), metadata: this.read('metadata') };
      const outputs = this.read('outputs');
      const same =
        this.raw !== null &&
        this.raw.source === parts.source &&
        this.raw.metadata === parts.metadata &&
        this.raw.outputs === outputs;
      this.stale.clear();
      if (!same) {
        this.raw = { cell_type: cell.type, id: cell.id, ...parts, outputs };
      }
    }
    return this.raw as IJsonObject;
  }

  /** Take over what was written into the cell. */
  written(raw: IJsonObject): void {
    this.raw = raw;
  }

  /** Whether the outputs are of another run than when this was last asked. */
  ranAgain(): boolean {
    const run = runOf(this.json());
    const again = run !== this.run;
    this.run = run;
    return again;
  }

  private read(part: Part): unknown {
    const known = this.raw?.[part];
    if (this.raw !== null && !this.stale.has(part)) {
      return known;
    }
    const found = READERS[part](this.cell);
    // Jupyter makes outputs anew without changing them, as when a notebook is trusted.
    return equal(known, found) ? known : found;
  }

  private readonly stale = new Set<Part>();
  private raw: IJsonObject | null = null;
  private run = '';
}

const READERS: { readonly [part in Part]: (cell: ICellModel) => unknown } = {
  source: cell => cell.sharedModel.getSource(),
  metadata: cellMetadata,
  outputs: cell => (cell.type === 'code' ? outputsOf(cell as ICodeCellModel) : [])
};

/** What tells one stamped run from another: its id and its content; "" without a stamp. */
function runOf(cell: IJsonObject): string {
  const stamped = (cell.outputs as IJsonObject[]).map(output => mapping(output.metadata));
  const [last] = stamped.filter(metadata => KEY in metadata).slice(-1);
  const run = own(mapping(own(last ?? {}, RUN_KEY)), 'run_id');
  return last ? JSON.stringify([run, own(mapping(last[KEY]), 'digest')]) : '';
}

function cellMetadata(cell: ICellModel): IJsonObject {
  const out: IJsonObject = {};
  for (const key of [KEY, 'tags']) {
    const value = cell.getMetadata(key);
    if (value !== undefined) {
      out[key] = value;
    }
  }
  return out;
}

/** The outputs without their data, unless they show what a stamp must agree with. */
function outputsOf(cell: ICodeCellModel): unknown[] {
  const out: IJsonObject[] = [];
  for (let index = 0; index < cell.outputs.length; index++) {
    const metadata = mapping(cell.outputs.get(index).metadata);
    const kept: IJsonObject = {};
    for (const key of [KEY, RUN_KEY]) {
      const value = own(metadata, key);
      if (value !== undefined) {
        kept[key] = value;
      }
    }
    out.push({ metadata: kept });
  }
  if (out.some(output => KEY in mapping(output.metadata))) {
    out.forEach((output, index) => {
      const text = own(mapping(cell.outputs.get(index).data), PLAIN);
      if (text !== undefined) {
        output.data = { [PLAIN]: text };
      }
    });
  }
  return out;
}

export interface ICommandResult {
  readonly ok: boolean;
  readonly text: string;
  /** Ids of the cells whose reference is now their own generation. */
  readonly cells: string[];
}

export class NotebookStamper {
  /** Milliseconds of the extension's own work, the latest last. */
  readonly times: { change: number[]; refresh: number[]; save: number[] } = {
    change: [],
    refresh: [],
    save: []
  };

  constructor(
    readonly context: DocumentRegistry.IContext<INotebookModel>,
    private readonly policy: () => StampPolicy
  ) {
    void context.ready.then(() => this.start());
    context.disposed.connect(() => this.dispose());
  }

  get status(): IStatus {
    return this._status;
  }

  get changed(): ISignal<this, IStatus> {
    return this._changed;
  }

  dispose(): void {
    window.clearTimeout(this.timer);
    Signal.clearData(this);
  }

  /** Promote stamps because the user asked for it. */
  promote(update: Update, cellId?: string): ICommandResult {
    this.cancel();
    const cells = this.cells();
    const at = cells.findIndex(cell => cell.id === cellId);
    if (cellId !== undefined && at < 0) {
      return { ok: false, text: 'there is no such cell in this notebook', cells: [] };
    }
    const selected: Selection = cellId === undefined ? () => true : index => index === at;
    const found = this.write(update, selected);
    this.refresh(typeof found !== 'string');
    return typeof found === 'string' ? failure(found) : this.result(found);
  }

  private result(changes: readonly IChange[]): ICommandResult {
    const recorded = this.status.cells.filter(cell => cell.standing === 'recorded');
    const done = changes.filter(change => ['added', 'replaced'].includes(change.kind));
    const refused = changes.filter(change => ['refused', 'kept'].includes(change.kind));
    const [first] = refused.length ? refused : done.length ? done : changes;
    const counted = `${done.length} reference${done.length === 1 ? '' : 's'} written`;
    const why = first ? `; ${first.label}: ${first.why}` : '; no cell carries a stamp';
    return {
      ok: !refused.length && changes.length > 0,
      text: counted + why,
      cells: recorded.map(cell => cell.view.cellId)
    };
  }

  private cells(): ICellModel[] {
    return [...this.context.model.cells];
  }

  private get isGone(): boolean {
    return this.context.isDisposed || this.context.model.isDisposed;
  }

  private start(): void {
    if (this.isGone) {
      return;
    }
    const model = this.context.model;
    this.cells().forEach(cell => this.watch(cell));
    model.cells.changed.connect(() => {
      this.cells().forEach(cell => this.watch(cell));
      this.rearranged = true;
      this.schedule();
    }, this);
    model.metadataChanged.connect((_, args) => {
      if (args.key === KEY && !this.writing) {
        this.shared = undefined;
        this.schedule();
      }
    }, this);
    // Emitted before the model is serialised: nothing is lost to the debounce.
    this.context.saveState.connect((_, state) => {
      if (state === 'started') {
        this.timed('save', () => this.flush(() => true));
      }
    }, this);
    this.context.sessionContext.iopubMessage.connect((_, message) => this.heard(message), this);
    // Opening a notebook never writes.
    this.cells().forEach(cell => void this.snapshotOf(cell).ranAgain());
    this.refresh();
  }

  /** Put back what this page's `%detllm stamps` brings: with several pages, in one of them. */
  private heard(message: IMessage): void {
    const kernel = this.context.sessionContext.session?.kernel;
    const asked = mapping(message.parent_header).session === kernel?.clientId;
    if (message.header.msg_type === 'display_data' && asked && !this.context.model.readOnly) {
      putBack(this.cells(), lostOutputs(message.content));
    }
  }

  private watch(cell: ICellModel): void {
    if (this.snapshots.has(cell)) {
      return;
    }
    const snapshot = new Snapshot(cell);
    this.snapshots.set(cell, snapshot);
    const changed = (part: Part) => {
      const start = performance.now();
      snapshot.forget(part);
      this.schedule();
      this.note('change', start);
    };
    cell.sharedModel.changed.connect((_, change) => {
      if (change.sourceChange) {
        changed('source');
      }
    }, this);
    cell.metadataChanged.connect((_, args) => {
      if (!this.writing && (args.key === KEY || args.key === 'tags')) {
        changed('metadata');
      }
    }, this);
    if (cell.type === 'code') {
      (cell as ICodeCellModel).outputs.changed.connect(() => {
        this.touched.add(cell);
        changed('outputs');
      }, this);
    }
  }

  private schedule(): void {
    if (!this.timer) {
      this.timer = window.setTimeout(() => {
        this.timed('refresh', () => this.flush(null));
      }, DEBOUNCE_MS);
    }
  }

  private cancel(): void {
    window.clearTimeout(this.timer);
    this.timer = 0;
  }

  private timed(kind: 'refresh' | 'save', work: () => void): void {
    const start = performance.now();
    work();
    this.note(kind, start);
  }

  private note(kind: 'change' | 'refresh' | 'save', start: number): void {
    const times = this.times[kind];
    times.push(performance.now() - start);
    times.splice(0, times.length - KEPT_TIMES);
  }

  /** Promote what the policy says: of all cells on Save, of the cells run here otherwise. */
  private flush(all: Selection | null): void {
    this.cancel();
    if (this.isGone) {
      return;
    }
    const policy = this.policy();
    const touched = new Set([...this.touched].filter(cell => this.snapshotOf(cell).ranAgain()));
    const due = all !== null || touched.size > 0 || (this.rearranged && this.inOrder);
    let written = false;
    if (policy !== 'off' && due) {
      const cells = this.cells();
      const done = this.write(policy, all ?? (index => touched.has(cells[index])));
      written = typeof done !== 'string';
    }
    this.touched.clear();
    this.rearranged = false;
    this.refresh(written);
  }

  private json(cells: readonly ICellModel[]): IJsonObject {
    if (this.shared === undefined) {
      const value = this.context.model.getMetadata(KEY);
      this.shared = value === undefined ? {} : { [KEY]: value };
    }
    const raw = cells.map(cell => this.snapshotOf(cell).json());
    return { nbformat: 4, cells: raw, metadata: this.shared };
  }

  private snapshotOf(cell: ICellModel): Snapshot {
    this.watch(cell);
    return this.snapshots.get(cell) as Snapshot;
  }

  /** Promote in the open model; what was done, or one line why nothing was. */
  private write(update: Update, selected: Selection): readonly IChange[] | string {
    const model = this.context.model;
    if (model.readOnly) {
      return 'the notebook is read-only here';
    }
    const cells = this.cells();
    const before = this.json(cells);
    try {
      const { notebook, changes } = promote(before, update, selected);
      this.writing = true;
      (notebook.cells as IJsonObject[]).forEach((raw, index) => {
        if (raw !== (before.cells as IJsonObject[])[index]) {
          this.writeCell(cells[index], raw);
        }
      });
      if (notebook.metadata !== before.metadata) {
        setMetadata(model, own(mapping(notebook.metadata), KEY));
        this.shared = notebook.metadata as IJsonObject;
      }
      return changes;
    } catch (error) {
      if (error instanceof NotebookError) {
        return error.message;
      }
      throw error;
    } finally {
      this.writing = false;
    }
  }

  private writeCell(cell: ICellModel, raw: IJsonObject): void {
    setMetadata(cell, own(mapping(raw.metadata), KEY));
    this.snapshotOf(cell).written(raw);
  }

  private refresh(written = false): void {
    const notebook = this.json(this.cells());
    this._status = statusOf(readNotebook(notebook));
    this.inOrder = written || isInOrder(notebook);
    this._changed.emit(this._status);
  }

  private readonly snapshots = new WeakMap<ICellModel, Snapshot>();
  /** Cells whose outputs changed and were not looked at yet. */
  private readonly touched = new Set<ICellModel>();
  private shared: IJsonObject | undefined;
  private rearranged = false;
  /** Whether the notebook's metadata follows from its cells, so that it is kept so. */
  private inOrder = false;
  private writing = false;
  private timer = 0;
  private _status: IStatus = EMPTY;
  private readonly _changed = new Signal<this, IStatus>(this);
}

function failure(text: string): ICommandResult {
  return { ok: false, text, cells: [] };
}

interface IHasMetadata {
  setMetadata(key: string, value: unknown): void;
  deleteMetadata(key: string): void;
}

function setMetadata(target: IHasMetadata, value: unknown): void {
  if (value === undefined) {
    target.deleteMetadata(KEY);
  } else {
    target.setMetadata(KEY, value);
  }
}

function isInOrder(notebook: IJsonObject): boolean {
  try {
    return promote(notebook, 'new', () => false).notebook === notebook;
  } catch (error) {
    if (error instanceof NotebookError) {
      return false;
    }
    throw error;
  }
}
