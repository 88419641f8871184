/** What of a cell decides about its stamp, as the server is sent it. */
import { ICellModel, ICodeCellModel } from '@jupyterlab/cells';

import { IJsonObject, equal, mapping, own } from './core/json';

export const KEY = 'detllm';
const RUN_KEY = 'detllm_run';
const SHOWN = ['text/plain', 'text/html'];

export type Part = 'source' | 'metadata' | 'outputs';

/** A cell as JSON, read again only where it changed. */
export class Snapshot {
  constructor(readonly cell: ICellModel) {}

  forget(part: Part): void {
    this.stale.add(part);
  }

  /** The same object as long as nothing changed: what the server holds is known by it. */
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
  written(metadata: IJsonObject): void {
    this.raw = { ...this.json(), metadata, outputs: READERS.outputs(this.cell) };
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
  source: cell => (cell.type === 'code' ? cell.sharedModel.getSource() : ''),
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

export function cellMetadata(cell: ICellModel): IJsonObject {
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
      const data = mapping(cell.outputs.get(index).data);
      // Of another format only that it is there: it is shown in place of the text.
      const kept = Object.keys(data).map(kind => [kind, SHOWN.includes(kind) ? data[kind] : null]);
      if (kept.length) {
        output.data = Object.fromEntries(kept);
      }
    });
  }
  return out;
}
