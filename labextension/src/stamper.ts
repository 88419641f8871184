/**
 * Keeps a notebook's references in its metadata. One per document, whatever shows it.
 *
 * The server judges and says what to write; the document is changed here, and only where
 * it still is what was judged.
 */
import { ICellModel, ICodeCellModel } from '@jupyterlab/cells';
import { DocumentRegistry } from '@jupyterlab/docregistry';
import { INotebookModel } from '@jupyterlab/notebook';
import { ISignal, Signal } from '@lumino/signaling';

import { IJsonObject, equal, mapping } from './core/json';
import { IAnswer, IChange, IPatch, Update } from './core/protocol';
import { IStatus, WAITING, isOutdated, notCompared, statusOf } from './core/status';
import { JudgeClient, MissingError } from './judge';
import { lostOutputs, putBack } from './restore';
import { KEY, Part, Snapshot, cellMetadata } from './snapshot';

export type StampPolicy = Update | 'off';

/** How long changes are gathered before they are looked at. */
const DEBOUNCE_MS = 250;
const KEPT_TIMES = 200;
/** How long a save waits for references; without them it goes on, and the next has them. */
const SAVE_WAITS_MS = 2000;
/** How often what was changed while it was judged is judged again at once. */
const ATTEMPTS = 3;

interface IMessage {
  readonly header: { readonly msg_type: string };
  readonly parent_header: unknown;
  readonly content: unknown;
}

export interface ICommandResult {
  readonly ok: boolean;
  readonly text: string;
  /** Ids of the cells whose reference is now their own generation. */
  readonly cells: string[];
}

/** What is promoted in a round: what the policy says, or what a user asked for. */
interface IRound {
  readonly update: Update | null;
  /** null for all cells. */
  readonly chosen: readonly ICellModel[] | null;
}

/** How a round ended: with the answer, or one line why nothing was promoted. */
type Outcome = { readonly answer: IAnswer; readonly current: boolean } | string;

export class NotebookStamper {
  /** Milliseconds, the latest last: our own work, waiting for an answer, keeping a save. */
  readonly times: { change: number[]; refresh: number[]; answer: number[]; save: number[] } = {
    change: [],
    refresh: [],
    answer: [],
    save: []
  };

  constructor(
    readonly context: DocumentRegistry.IContext<INotebookModel>,
    private readonly client: JudgeClient,
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

  /** Whether something changed that the status does not show yet. */
  get busy(): boolean {
    return this.timer !== 0 || this.rounds > 0;
  }

  dispose(): void {
    this.cancel();
    Signal.clearData(this);
  }

  /** Promote stamps because the user asked for it. */
  async promote(update: Update, cellId?: string): Promise<ICommandResult> {
    const chosen = cellId === undefined ? null : this.cells().filter(cell => cell.id === cellId);
    if (chosen?.length === 0) {
      return failure('there is no such cell in this notebook');
    }
    if (this.context.model.readOnly) {
      return failure('the notebook is read-only here');
    }
    const outcome = await this.insist(() => ({ update, chosen }));
    if (typeof outcome === 'string') {
      return failure(outcome);
    }
    const { answer, current } = outcome;
    return current
      ? this.result(answer.changes)
      : failure('the notebook was changed meanwhile: nothing was written');
  }

  private result(changes: readonly IChange[]): ICommandResult {
    const recorded = this.status.cells.filter(row => row.standing === 'recorded');
    const done = changes.filter(change => ['added', 'replaced'].includes(change.kind));
    const refused = changes.filter(change => ['refused', 'kept', 'lost'].includes(change.kind));
    const [first] = refused.length ? refused : done.length ? done : changes;
    const counted = `${done.length} reference${done.length === 1 ? '' : 's'} written`;
    const why = first ? `; ${first.label}: ${first.why}` : '; no cell carries a stamp';
    return {
      ok: !refused.length && changes.length > 0,
      text: counted + why,
      cells: recorded.map(row => row.id)
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
    this.stampBeforeSaving();
    this.context.sessionContext.iopubMessage.connect((_, message) => this.heard(message), this);
    // Opening a notebook never writes.
    this.cells().forEach(cell => void this.snapshotOf(cell).ranAgain());
    void this.round(() => ({ update: null, chosen: null }));
  }

  /** Save what the policy promotes: nothing is lost to the debounce. */
  private stampBeforeSaving(): void {
    const { context } = this;
    // JupyterLab serialises at once when it says that it saves, so its signal is too late.
    const [save, saveAs] = [context.save.bind(context), context.saveAs.bind(context)];
    context.save = async () => {
      await this.beforeSave();
      return save();
    };
    context.saveAs = async () => {
      await this.beforeSave();
      return saveAs();
    };
  }

  private async beforeSave(): Promise<void> {
    const start = performance.now();
    await this.context.ready;
    const update = this.writable(this.policy());
    if (update !== null) {
      const limit = new Promise(resolve => window.setTimeout(resolve, SAVE_WAITS_MS));
      await Promise.race([this.insist(() => ({ update, chosen: null })), limit]);
    }
    this.note('save', start);
  }

  private writable(policy: StampPolicy): Update | null {
    const { model } = this.context;
    return policy === 'off' || this.isMissing || this.isGone || model.readOnly ? null : policy;
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
      if (part === 'source') {
        this.markStale(cell);
      }
      this.schedule();
      this.note('change', start);
    };
    cell.metadataChanged.connect((_, args) => {
      if (!this.writing && (args.key === KEY || args.key === 'tags')) {
        changed('metadata');
      }
    }, this);
    if (cell.type === 'code') {
      cell.sharedModel.changed.connect((_, change) => {
        if (change.sourceChange) {
          changed('source');
        }
      }, this);
      (cell as ICodeCellModel).outputs.changed.connect(() => {
        if (!this.writing) {
          this.touched.add(cell);
          changed('outputs');
        }
      }, this);
    }
  }

  /** Show at once that a source is no longer the one that was judged, or is again. */
  private markStale(cell: ICellModel): void {
    const row = this.answer?.cells.find(found => found.id === cell.id);
    const isStale = row !== undefined && isOutdated(row, cell.sharedModel.getSource());
    if (isStale !== this.stale.has(cell.id)) {
      this.stale[isStale ? 'add' : 'delete'](cell.id);
      this.show();
    }
  }

  private schedule(): void {
    if (!this.timer && !this.isGone && !this.isMissing) {
      this.timer = window.setTimeout(() => void this.round(() => this.automatic()), DEBOUNCE_MS);
    }
  }

  private cancel(): void {
    window.clearTimeout(this.timer);
    this.timer = 0;
  }

  private note(kind: 'change' | 'refresh' | 'answer' | 'save', start: number): void {
    const times = this.times[kind];
    times.push(performance.now() - start);
    times.splice(0, times.length - KEPT_TIMES);
  }

  /** Promote what the policy says of the cells that ran here. */
  private automatic(): IRound {
    const due = this.ran.size > 0 || (this.rearranged && this.inOrder);
    return { update: due ? this.writable(this.policy()) : null, chosen: [...this.ran] };
  }

  /** Judge until nothing changed meanwhile. */
  private async insist(plan: () => IRound): Promise<Outcome> {
    let outcome = await this.round(plan);
    for (let i = 1; i < ATTEMPTS && typeof outcome !== 'string' && !outcome.current; i++) {
      outcome = await this.round(plan);
    }
    return outcome;
  }

  /** Have the notebook judged as it is, one round after the other. */
  private round(plan: () => IRound): Promise<Outcome> {
    this.cancel();
    this.rounds++;
    const done = this.last.then(() => this.judge(plan)).finally(() => this.rounds--);
    this.last = done.catch(() => undefined);
    return done;
  }

  private async judge(plan: () => IRound): Promise<Outcome> {
    if (this.isGone) {
      return 'the notebook was closed';
    }
    let start = performance.now();
    this.touched.forEach(cell => this.snapshotOf(cell).ranAgain() && this.ran.add(cell));
    this.touched.clear();
    const { update, chosen } = plan();
    const cells = this.cells();
    const numbers = (some: Iterable<ICellModel>) =>
      [...some].map(cell => cells.indexOf(cell) + 1).filter(number => number > 0);
    const judged: IJudged = { cells, raw: cells.map(cell => this.snapshotOf(cell).json()) };
    const shared = this.sharedMetadata();
    const ran = [...this.ran];
    this.note('refresh', start);
    start = performance.now();
    let answer: IAnswer;
    try {
      answer = await this.client.judge({
        cells: judged.raw,
        metadata: shared ?? null,
        update,
        chosen: chosen && numbers(chosen),
        ran: numbers(ran)
      });
    } catch (error) {
      const why = error instanceof Error ? error.message : String(error);
      this.isMissing = error instanceof MissingError;
      this.answer = null;
      this.show(why);
      return `not compared here: ${why}`;
    }
    this.isMissing = false;
    this.note('answer', start);
    start = performance.now();
    const current = !this.isGone && this.take(judged, shared, answer, ran);
    this.note('refresh', start);
    return answer.refused ?? { answer, current };
  }

  /** Write what an answer says and show it; false where the document is another by now. */
  private take(
    judged: IJudged,
    shared: unknown,
    answer: IAnswer,
    ran: readonly ICellModel[]
  ): boolean {
    const { patch } = answer;
    if (patch !== null && !(this.isCurrent(judged, shared, patch) && this.write(judged, patch))) {
      this.schedule();
      return false;
    }
    ran.forEach(cell => this.ran.delete(cell));
    if (ran.length) {
      this.notes = answer.notes;
    }
    this.rearranged = this.rearranged && !this.isArrangedAs(judged.cells);
    this.answer = answer;
    this.inOrder = answer.in_order;
    this.stale.clear();
    for (const row of answer.cells) {
      const cell: ICellModel | undefined = judged.cells[row.number - 1];
      if (cell && isOutdated(row, cell.sharedModel.getSource())) {
        this.stale.add(cell.id);
      }
    }
    this.show();
    return true;
  }

  private isArrangedAs(cells: readonly ICellModel[]): boolean {
    const now = this.cells();
    return now.length === cells.length && now.every((cell, i) => cell === cells[i]);
  }

  /** Whether a patch still fits: no stamp or reference changed, nor the source of its cells. */
  private isCurrent(judged: IJudged, shared: unknown, patch: IPatch): boolean {
    const written = new Set(patch.cells.map(([number]) => number));
    return (
      this.isArrangedAs(judged.cells) &&
      this.sharedMetadata() === shared &&
      judged.raw.every((raw, i) => {
        const now = this.snapshotOf(judged.cells[i]).json();
        const same = now.metadata === raw.metadata && now.outputs === raw.outputs;
        return same && (now.source === raw.source || !written.has(i + 1));
      })
    );
  }

  private write(judged: IJudged, patch: IPatch): boolean {
    const model = this.context.model;
    if (model.readOnly) {
      return false;
    }
    this.writing = true;
    try {
      for (const [number, index, metadata] of patch.outputs) {
        setOutputMetadata(judged.cells[number - 1] as ICodeCellModel, index, metadata);
      }
      for (const [number, metadata] of patch.cells) {
        const cell = judged.cells[number - 1];
        setMetadata(cell, metadata);
        this.snapshotOf(cell).written(cellMetadata(cell));
      }
      if (!equal(patch.metadata ?? undefined, this.sharedMetadata())) {
        setMetadata(model, patch.metadata);
        this.shared = undefined;
      }
    } finally {
      this.writing = false;
    }
    return true;
  }

  /** The notebook's own metadata: the same object as long as it did not change. */
  private sharedMetadata(): unknown {
    if (this.shared === undefined) {
      this.shared = { value: this.context.model.getMetadata(KEY) };
    }
    return this.shared.value;
  }

  private snapshotOf(cell: ICellModel): Snapshot {
    this.watch(cell);
    return this.snapshots.get(cell) as Snapshot;
  }

  private show(problem = ''): void {
    if (this.answer !== null) {
      this._status = statusOf(this.answer, this.stale, this.notes);
    } else if (problem) {
      this._status = notCompared(problem);
    }
    this._changed.emit(this._status);
  }

  private readonly snapshots = new WeakMap<ICellModel, Snapshot>();
  /** Cells whose outputs changed and were not looked at yet. */
  private readonly touched = new Set<ICellModel>();
  /** Cells that ran here and were not judged since. */
  private readonly ran = new Set<ICellModel>();
  /** Ids of the cells whose source was changed since they were judged. */
  private readonly stale = new Set<string>();
  private shared: { readonly value: unknown } | undefined;
  private rearranged = false;
  /** Whether the notebook's metadata follows from its cells, so that it is kept so. */
  private inOrder = false;
  private writing = false;
  /** Whether the server cannot judge: then only a command asks it again. */
  private isMissing = false;
  private timer = 0;
  private rounds = 0;
  private last: Promise<unknown> = Promise.resolve();
  private answer: IAnswer | null = null;
  private notes: readonly string[] = [];
  private _status: IStatus = WAITING;
  private readonly _changed = new Signal<this, IStatus>(this);
}

/** The document as it was when it was sent. */
interface IJudged {
  readonly cells: readonly ICellModel[];
  readonly raw: readonly IJsonObject[];
}

function failure(text: string): ICommandResult {
  return { ok: false, text, cells: [] };
}

function setOutputMetadata(cell: ICodeCellModel, index: number, value: IJsonObject): void {
  const output = cell.outputs.get(index).toJSON();
  const metadata = { ...mapping(output.metadata), [KEY]: value };
  cell.outputs.set(index, { ...output, metadata } as typeof output);
}

interface IHasMetadata {
  setMetadata(key: string, value: unknown): void;
  deleteMetadata(key: string): void;
}

function setMetadata(target: IHasMetadata, value: IJsonObject | null): void {
  if (value === null) {
    target.deleteMetadata(KEY);
  } else {
    target.setMetadata(KEY, value);
  }
}
