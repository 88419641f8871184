/** A notebook as a JSON object to its stamped cells; `core/notebook.py` in the browser. */
import {
  CanonicalError,
  IJsonObject,
  brief,
  isObject,
  isUnicode,
  mapping,
  own
} from './canonical';
import { IFingerprint, readFingerprint } from './fingerprint';
import { lineName, lineOption, magicLine } from './magicline';
import { IPolicy, PolicyError, parsePolicy } from './policy';
import { StampError } from './reader';
import { stillShown } from './showing';
import { IStamp, readStamp, sourceDigest } from './stamp';
import { IOutcome, NO_FACTS, decide, factsOf } from './verdict';

export const KEY = 'detllm';
export const RUN_KEY = 'detllm_run';
export const CELL_SCHEMA = 'detllm.cell/1';
export const NOTEBOOK_SCHEMA = 'detllm.notebook/1';
export const SKIP_TAG = 'detllm-skip';
const POLICY_TAG = 'detllm-policy-';

export class NotebookError extends Error {}

/** A cell as its own content makes it, whatever stands around it. */
export interface IParsedCell {
  readonly meta: IJsonObject;
  readonly source: string;
  readonly isDetgen: boolean;
  readonly name: string;
  readonly shownName: string;
  readonly skipped: boolean;
  readonly policy: IPolicy | null;
  readonly actual: IStamp | null;
  readonly reference: IStamp | null;
  readonly previous: IStamp | null;
  readonly actualJson: IJsonObject | null;
  readonly referenceJson: IJsonObject | null;
  readonly runId: string | null;
  readonly sameRun: boolean;
  readonly problems: readonly string[];
  readonly sourceDigest: string;
}

export interface ICellView extends IParsedCell {
  /** Position in the notebook, from 1, counting all cells. */
  readonly number: number;
  readonly cellId: string;
  readonly label: string;
}

export interface INotebookView {
  readonly cells: readonly ICellView[];
  readonly fingerprints: ReadonlyMap<string, IFingerprint>;
  readonly problems: readonly string[];
}

/** The cells of a notebook that generate or carry stamps. */
export function readNotebook(notebook: IJsonObject): INotebookView {
  const cells = checkFormat(notebook);
  const [fingerprints, problems] = readFingerprints(notebook);
  const out: ICellView[] = [];
  const names = new Map<string, number>();
  cells.forEach((cell, index) => {
    if (!isObject(cell)) {
      throw new NotebookError(`cell ${index + 1} is not an object`);
    }
    const parsed = own(cell, 'cell_type') === 'code' ? parsedCell(cell) : null;
    if (parsed) {
      out.push(placed(parsed, cell, index + 1, names));
    }
  });
  return { cells: out, fingerprints, problems };
}

export function checkFormat(notebook: IJsonObject): unknown[] {
  const cells = own(notebook, 'cells');
  if (own(notebook, 'nbformat') !== 4 || !Array.isArray(cells)) {
    throw new NotebookError('this is not a notebook of nbformat 4');
  }
  return cells;
}

function schemaProblems(meta: IJsonObject, schema: string, where: string): string[] {
  const found = own(meta, 'schema');
  if (found === undefined || found === schema) {
    return [];
  }
  return [
    `the ${where}'s metadata has schema ${brief(found)}; expected '${schema}'. ` +
      'Try: pip install -U jupyter-detllm'
  ];
}

type Fingerprints = [ReadonlyMap<string, IFingerprint>, readonly string[]];
const knownFingerprints = new WeakMap<object, Fingerprints>();

function readFingerprints(notebook: IJsonObject): Fingerprints {
  const meta = mapping(own(mapping(own(notebook, 'metadata')), KEY));
  let found = knownFingerprints.get(meta);
  if (!found) {
    found = parseFingerprints(meta);
    knownFingerprints.set(meta, found);
  }
  return found;
}

function parseFingerprints(meta: IJsonObject): Fingerprints {
  const found = new Map<string, IFingerprint>();
  const problems = schemaProblems(meta, NOTEBOOK_SCHEMA, 'notebook');
  for (const [digest, data] of Object.entries(mapping(own(meta, 'fingerprints')))) {
    try {
      const fingerprint = readFingerprint(data);
      if (fingerprint.digest !== digest) {
        throw new StampError('a fingerprint in notebook metadata disagrees with its digest');
      }
      found.set(digest, fingerprint);
    } catch (error) {
      if (!(error instanceof StampError || error instanceof CanonicalError)) {
        throw error;
      }
      problems.push(error.message);
    }
  }
  return [found, problems];
}

/** Multi-line text, stored as a string or a list of them; null if it is none. */
function multiline(value: unknown): string | null {
  const isLines = Array.isArray(value) && value.every(line => typeof line === 'string');
  const text = isLines ? (value as string[]).join('') : value;
  return typeof text === 'string' && isUnicode(text) ? text : null;
}

const parsedCells = new WeakMap<object, IParsedCell | null>();

/** A code cell parsed; the result is kept with its object, which must not change. */
function parsedCell(cell: IJsonObject): IParsedCell | null {
  let found = parsedCells.get(cell);
  if (found === undefined) {
    found = parseCell(cell);
    parsedCells.set(cell, found);
  }
  return found;
}

function parseCell(cell: IJsonObject): IParsedCell | null {
  const metadata = mapping(own(cell, 'metadata'));
  const meta = mapping(own(metadata, KEY));
  const problems = schemaProblems(meta, CELL_SCHEMA, 'cell');
  const text = multiline(own(cell, 'source'));
  if (text === null) {
    problems.push("the cell's source is not Unicode text");
  }
  const source = text ?? '';
  const line = magicLine(source);
  const { stamped, runId } = outputStamp(cell);
  if (line === null && stamped === null && !Object.keys(meta).length) {
    return null;
  }
  const tags = tagsOf(metadata);
  const actual = attempt(stamped, "the output's stamp", problems);
  const name = lineName(line ?? '') || (line !== null && actual ? actual.name : '');
  if (line !== null && actual && !stillShown(actual, shownTexts(cell))) {
    problems.push('the text that the output shows is not the stamped one: run the cell again');
  }
  const policy = policyOf(tags, line ?? '', problems);
  const referenceJson = own(meta, 'reference');
  const reference = attempt(referenceJson, "the cell's reference", problems);
  return {
    meta,
    source,
    isDetgen: line !== null,
    name,
    shownName: name || (actual ? actual.name : ''),
    skipped: tags.has(SKIP_TAG),
    policy,
    actual,
    reference,
    previous: attempt(own(meta, 'previous'), 'the previous reference', []),
    actualJson: isObject(stamped) ? stamped : null,
    referenceJson: isObject(referenceJson) ? referenceJson : null,
    runId,
    sameRun: isSameRun(runId, meta, stamped),
    problems,
    sourceDigest: sourceDigest(source)
  };
}

function placed(
  parsed: IParsedCell,
  cell: IJsonObject,
  number: number,
  names: Map<string, number>
): ICellView {
  const { name, shownName } = parsed;
  const owner = name ? (names.get(name) ?? number) : number;
  if (name) {
    names.set(name, owner);
  }
  const id = own(cell, 'id');
  const taken = `the name '${name}' is already used by cell ${owner}`;
  return {
    ...parsed,
    number,
    cellId: typeof id === 'string' ? id.slice(0, 64) : '',
    label: shownName ? `cell ${number} (${shownName})` : `cell ${number}`,
    problems: owner === number ? parsed.problems : [taken, ...parsed.problems]
  };
}

function attempt(data: unknown, where: string, problems: string[]): IStamp | null {
  if (data === undefined || data === null) {
    return null;
  }
  try {
    return readStamp(data, where);
  } catch (error) {
    if (!(error instanceof StampError)) {
      throw error;
    }
    problems.push(error.message);
    return null;
  }
}

function outputsOf(cell: IJsonObject): unknown[] {
  const outputs = own(cell, 'outputs');
  return Array.isArray(outputs) ? outputs : [];
}

/** The last stamp in the cell's outputs, and its run id. */
function outputStamp(cell: IJsonObject): { stamped: unknown; runId: string | null } {
  for (const output of [...outputsOf(cell)].reverse()) {
    const metadata = mapping(own(mapping(output), 'metadata'));
    const stamped = own(metadata, KEY);
    if (stamped !== undefined) {
      const run = own(mapping(own(metadata, RUN_KEY)), 'run_id');
      return { stamped, runId: typeof run === 'string' ? run : null };
    }
  }
  return { stamped: null, runId: null };
}

/** Whether the output is the promoted run: it is, unless something tells otherwise. */
function isSameRun(run: string | null, meta: IJsonObject, stamped: unknown): boolean {
  const recorded = own(meta, 'recorded_run');
  if (run !== null && typeof recorded === 'string' && run !== recorded) {
    return false;
  }
  // Without ids nothing says that the cell was run again; another content does.
  const reference = mapping(own(meta, 'reference'));
  const digests = [own(reference, 'digest'), own(mapping(stamped), 'digest')];
  return Object.keys(reference).length > 0 && digests[0] === digests[1];
}

/** The plain texts of a cell's outputs, without the line of its stamp. */
function shownTexts(cell: IJsonObject): string[] {
  return outputsOf(cell)
    .map(mapping)
    .filter(output => own(mapping(own(output, 'metadata')), KEY) === undefined)
    .map(output => multiline(own(mapping(own(output, 'data')), 'text/plain')))
    .filter((text): text is string => text !== null);
}

function tagsOf(metadata: IJsonObject): Set<string> {
  const tags = own(metadata, 'tags');
  const texts = Array.isArray(tags) ? tags.filter(tag => typeof tag === 'string') : [];
  return new Set(texts as string[]);
}

function policyOf(tags: Set<string>, line: string, problems: string[]): IPolicy | null {
  const option = lineOption(line, '--policy');
  const tagged = [...tags].filter(tag => tag.startsWith(POLICY_TAG)).sort();
  const text = option ?? (tagged.length ? tagged[0].slice(POLICY_TAG.length) : null);
  if (text === null) {
    return null;
  }
  try {
    return parsePolicy(text);
  } catch (error) {
    if (!(error instanceof PolicyError)) {
      throw error;
    }
    problems.push(error.message);
    return null;
  }
}

const outcomes = new WeakMap<IStamp, { against: IStamp; key: string; outcome: IOutcome }>();

/** The verdict about a cell from what the notebook holds, and nothing else. */
export function checkCell(cell: ICellView, view: INotebookView): IOutcome {
  if (cell.problems.length) {
    return decide({ ...NO_FACTS, problems: cell.problems });
  }
  const { reference, actual } = cell;
  if (reference === null || actual === null) {
    return decide({
      ...NO_FACTS,
      hasReference: reference !== null,
      hasActual: actual !== null
    });
  }
  const stored = view.fingerprints.get(reference.fingerprintDigest);
  const fingerprint = reference.fingerprint ?? stored ?? null;
  const key = `${cell.sourceDigest} ${cell.sameRun} ${fingerprint !== null}`;
  const kept = outcomes.get(actual);
  if (kept && kept.against === reference && kept.key === key) {
    return kept.outcome;
  }
  const outcome = decide(
    factsOf(
      { stamp: reference, fingerprint },
      { stamp: actual, fingerprint: actual.fingerprint },
      cell.sourceDigest,
      cell.sameRun
    )
  );
  outcomes.set(actual, { against: reference, key, outcome });
  return outcome;
}
