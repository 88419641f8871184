/** Outputs that a closed page lost: `%detllm stamps` sends them, and they are put back. */
import { ICellModel, ICodeCellModel } from '@jupyterlab/cells';

import { IJsonObject, isObject, mapping, own } from './core/json';
import { isDetgen, sourceDigest } from './core/source';
import { KEY } from './snapshot';

type Output = Parameters<ICodeCellModel['outputs']['add']>[0];

const LEDGER_KEY = 'detllm_ledger';
const VERSION = 1;
const MAX_ID = 64;

/** What a cell showed when it ran: its texts, and its stamp last. */
export interface ILost {
  readonly cellId: string;
  readonly outputs: readonly Output[];
  /** Digest of the source that the stamp is of; what else it says, the server judges. */
  readonly source: string;
}

/** What a kernel's message brings for cells of its notebook; nothing for any other message. */
export function lostOutputs(content: unknown): readonly ILost[] {
  const ledger = mapping(own(mapping(own(mapping(content), 'transient')), LEDGER_KEY));
  const cells = own(ledger, 'cells');
  if (own(ledger, 'version') !== VERSION || !Array.isArray(cells)) {
    return [];
  }
  return cells.map(lostOutput).filter((found): found is ILost => found !== null);
}

function lostOutput(cell: unknown): ILost | null {
  const cellId = own(mapping(cell), 'cell_id');
  const outputs = own(mapping(cell), 'outputs');
  if (typeof cellId !== 'string' || cellId.length > MAX_ID || !Array.isArray(outputs)) {
    return null;
  }
  const displays = outputs.map(mapping).map(display);
  const [last] = displays.slice(-1);
  const source = own(mapping(own(mapping(last?.metadata), KEY)), 'source');
  return typeof source === 'string' ? { cellId, outputs: displays, source } : null;
}

function display(output: IJsonObject): Output {
  const [data, metadata] = ['data', 'metadata'].map(key => mapping(own(output, key)));
  return { output_type: 'display_data', data, metadata } as Output;
}

/** Put outputs back into the cells that made them: same source, and no stamp of their own. */
export function putBack(cells: readonly ICellModel[], lost: readonly ILost[]): void {
  const byId = new Map(lost.map(found => [found.cellId, found]));
  for (const cell of cells) {
    const found = cell.type === 'code' ? byId.get(cell.id) : undefined;
    const source = cell.sharedModel.getSource();
    if (found && sourceDigest(source) === found.source && !isStamped(cell)) {
      fill(cell as ICodeCellModel, found.outputs, isDetgen(source));
    }
  }
}

function isStamped(cell: ICellModel): boolean {
  const outputs = (cell as ICodeCellModel).outputs.toJSON();
  return outputs.some(output => isObject(output.metadata) && KEY in output.metadata);
}

/** All a generating cell shows is ours; of another cell only the stamp is. */
function fill(cell: ICodeCellModel, outputs: readonly Output[], generates: boolean): void {
  if (generates) {
    cell.outputs.clear();
  }
  for (const output of generates ? outputs : outputs.slice(-1)) {
    cell.outputs.add(output);
  }
}
