/** Stamps of outputs promoted to references; `core/promotion.py` in the browser. */
import { IJsonObject, equal, isObject, mapping, own } from './canonical';
import {
  CELL_SCHEMA,
  ICellView,
  INotebookView,
  KEY,
  NOTEBOOK_SCHEMA,
  NotebookError,
  readNotebook
} from './notebook';
import { IStamp, STAMP_SCHEMA, generationDigest, modelJson, referenceJson, sameContent } from './stamp';

export type Update = 'new' | 'all';
export type ChangeKind = 'added' | 'replaced' | 'unchanged' | 'kept' | 'refused' | 'removed';

export interface IChange {
  readonly label: string;
  readonly kind: ChangeKind;
  readonly why: string;
}

export interface IPromotion {
  readonly notebook: IJsonObject;
  readonly changes: readonly IChange[];
}

/** Which cells a promotion may touch, by index from 0; the others keep what they have. */
export type Selection = (index: number) => boolean;

/**
 * The notebook with stamps promoted, and what was done per cell.
 *
 * The notebook returned is the one given, the same object, when nothing changed; so are
 * its cells. Python promotes all cells; `selected` limits that to one a user chose.
 */
export function promote(
  notebook: IJsonObject,
  update: Update,
  selected: Selection = () => true
): IPromotion {
  const view = readNotebook(notebook);
  checkSchema(notebook);
  const raw = notebook.cells as IJsonObject[];
  const cells = [...raw];
  const changes: IChange[] = [];
  for (const cell of view.cells.filter(found => selected(found.number - 1))) {
    const [change, meta] = decideCell(cell, update);
    changes.push(change);
    if (meta !== null) {
      cells[cell.number - 1] = withMetadata(cells[cell.number - 1], meta);
    }
  }
  raw.forEach((cell, index) => {
    // Lab keeps a code cell's metadata when it becomes markdown.
    if (own(cell, 'cell_type') !== 'code' && own(metadataOf(cell), KEY) !== undefined) {
      cells[index] = withMetadata(cell, null);
      const label = `cell ${index + 1}`;
      changes.push({ label, kind: 'removed', why: 'it is no longer a code cell' });
    }
  });
  const changed = cells.some((cell, index) => cell !== raw[index]);
  const promoted = changed ? { ...notebook, cells } : notebook;
  const shared = sharedOf(promoted, changed ? readNotebook(promoted) : view);
  const present = own(metadataOf(notebook), KEY);
  if (equal(shared, present ?? null)) {
    return { notebook: promoted, changes };
  }
  return { notebook: withMetadata(promoted, shared), changes };
}

function checkSchema(notebook: IJsonObject): void {
  const schema = own(ours(notebook), 'schema');
  if (schema !== undefined && schema !== NOTEBOOK_SCHEMA) {
    throw new NotebookError("the notebook's metadata is of another schema");
  }
}

function decideCell(cell: ICellView, update: Update): [IChange, IJsonObject | null] {
  const no = (kind: ChangeKind, why: string): [IChange, null] => [
    { label: cell.label, kind, why },
    null
  ];
  const yes = (kind: ChangeKind, why: string): [IChange, IJsonObject] => [
    { label: cell.label, kind, why },
    cellMeta(cell)
  ];
  if (cell.problems.length && !(update === 'all' && onlyReferenceBroken(cell))) {
    return no('refused', cell.problems[0]);
  }
  const { actual, reference } = cell;
  if (actual === null || cell.actualJson === null) {
    return no('unchanged', 'the output carries no stamp');
  }
  if (cell.sourceDigest !== actual.source) {
    return no('refused', 'the output is of an earlier source: run the cell first');
  }
  if (cell.referenceJson === null) {
    return yes('added', 'first reference');
  }
  if (reference !== null && sameContent(reference, actual)) {
    return no('unchanged', 'equal to its reference');
  }
  if (reference !== null && reference.source !== actual.source) {
    return yes('replaced', 'its source was changed');
  }
  if (update === 'all') {
    return yes('replaced', 'accepted');
  }
  return no('kept', 'it differs from its reference under the same source');
}

/** Whether the one problem is a reference of our own schema that can be replaced. */
function onlyReferenceBroken(cell: ICellView): boolean {
  const stored = cell.referenceJson;
  return (
    stored !== null &&
    cell.reference === null &&
    own(stored, 'schema') === STAMP_SCHEMA &&
    cell.actual !== null &&
    cell.problems.length === 1
  );
}

function cellMeta(cell: ICellView): IJsonObject {
  const meta: IJsonObject = {
    schema: CELL_SCHEMA,
    reference: referenceJson(cell.actualJson as IJsonObject)
  };
  if (cell.runId !== null) {
    meta.recorded_run = cell.runId;
  }
  if (cell.reference !== null && cell.referenceJson !== null) {
    meta.previous = { ...cell.referenceJson };
  }
  return meta;
}

function metadataOf(raw: IJsonObject): IJsonObject {
  return mapping(own(raw, 'metadata'));
}

function withMetadata(raw: IJsonObject, meta: IJsonObject | null): IJsonObject {
  const metadata = { ...metadataOf(raw) };
  if (meta === null) {
    delete metadata[KEY];
  } else {
    metadata[KEY] = meta;
  }
  return { ...raw, metadata };
}

/** The notebook-level metadata that follows from all references; null where there is none. */
function sharedOf(notebook: IJsonObject, view: INotebookView): IJsonObject | null {
  const references = view.cells.flatMap(cell => (cell.reference ? [cell.reference] : []));
  const unreadable = view.cells.some(cell => {
    const stored = own(cell.meta, 'reference');
    return cell.reference === null && stored !== undefined && stored !== null;
  });
  const kept = ours(notebook);
  if (!references.length) {
    // What a reference needs that cannot be read is unknown, so nothing is dropped.
    return unreadable ? kept : null;
  }
  return { ...kept, ...summary(references, view, kept, unreadable) };
}

function summary(
  references: readonly IStamp[],
  view: INotebookView,
  kept: IJsonObject,
  keep: boolean
): IJsonObject {
  const previous = view.cells.flatMap(cell => (cell.previous ? [cell.previous] : []));
  const wanted = new Set([...references, ...previous].map(stamp => stamp.fingerprintDigest));
  // What is stored and sound stays as it was written, unknown keys included.
  const found = new Map(Object.entries(mapping(own(kept, 'fingerprints'))));
  if (keep) {
    found.forEach((_, digest) => wanted.add(digest));
  }
  for (const cell of view.cells) {
    const digest = cell.actual?.fingerprint ? cell.actual.fingerprintDigest : null;
    if (digest !== null && !view.fingerprints.has(digest)) {
      found.set(digest, fingerprintJson(cell));
    }
  }
  const sorted = [...wanted].filter(digest => found.has(digest)).sort();
  return {
    schema: NOTEBOOK_SCHEMA,
    model: modelJson(references[0].model),
    fingerprints: Object.fromEntries(sorted.map(digest => [digest, found.get(digest)])),
    generations: references.map(generationDigest)
  };
}

const ROLES = ['identity', 'numerics', 'informational'];

/** The stamp's fingerprint as Python writes it again: known keys, empty roles left out. */
function fingerprintJson(cell: ICellView): IJsonObject {
  const stored = mapping(own(cell.actualJson as IJsonObject, 'fingerprint'));
  const out: IJsonObject = { schema: own(stored, 'schema') };
  for (const role of ROLES) {
    const fields = own(stored, role);
    if (isObject(fields) && Object.keys(fields).length) {
      out[role] = fields;
    }
  }
  return out;
}

function ours(notebook: IJsonObject): IJsonObject {
  return mapping(own(metadataOf(notebook), KEY));
}

