/** Stamps and references; `core/stamp.py` and `core/stamp_reader.py` in the browser. */
import { IAttempt, attemptJson, checkAttempts, readAttempt } from './attempts';
import { IJsonObject, brief, digestOf, equal, isObject, utf8 } from './canonical';
import { IEvidence, evidenceJson, readEvidence } from './evidence';
import { IFingerprint, readFingerprint } from './fingerprint';
import { Reader, StampError, reading } from './reader';

export const STAMP_SCHEMA = 'detllm.stamp/1';
const FAMILY = 'detllm.stamp/';
const MAX_CALLS = 10_000;
const LEVELS = ['seeded', 'repeatable', 'invariant'];
const PARTS = ['weights', 'tokenizer', 'chat_template', 'adapter'] as const;
const WHITE = ' \t\v\f\n';

export interface IModel {
  readonly name: string;
  readonly weights: string | null;
  readonly tokenizer: string | null;
  readonly chat_template: string | null;
  /** Of the LoRA adapter in effect, null without one. */
  readonly adapter: string | null;
}

export interface IRequest {
  readonly stored: IJsonObject;
  readonly params: IJsonObject;
  readonly seeds: readonly string[];
  readonly digest: string;
  /** The prompt for people, null where only digests were stored. */
  readonly shown: string | null;
}

export interface IGeneration {
  readonly prompt: number;
  readonly completion: number;
  readonly tokenIds: readonly number[];
  readonly finishReason: string;
  readonly text: string;
  readonly offsets: readonly number[];
  readonly evidence: IEvidence | null;
}

export interface ICall {
  readonly requests: readonly IRequest[];
  readonly generations: readonly IGeneration[];
  readonly digest: string;
  /** Indices of the requests answered out of the result cache. */
  readonly cached: readonly number[];
  /** Which try of an expectation it is, null where there was none. */
  readonly attempt: IAttempt | null;
}

/** How far a self-test reaches, and whether a request or a call goes beyond that. */
export interface IReach {
  readonly tokens: number;
  readonly sequences: number;
  readonly beyond: boolean;
}

export interface IStamp {
  readonly name: string;
  readonly level: string;
  readonly source: string;
  readonly model: IModel;
  /** The stamp's own; a reference's stands in notebook metadata. */
  readonly fingerprint: IFingerprint | null;
  readonly fingerprintDigest: string;
  readonly late: readonly string[];
  readonly selfTest: string;
  /** How far the self-test reaches; null where it showed nothing. */
  readonly reach: IReach | null;
  readonly calls: readonly ICall[];
  /** The digest as stored, which is that of the stored content. */
  readonly storedDigest: string;
  readonly rootSeed: string;
}

/** A cell's source as it is digested. */
export function normaliseSource(source: string): string {
  const lines = source.replace(/\r\n/g, '\n').replace(/\r/g, '\n').split('\n');
  const first = lines.findIndex(line => [...line].some(char => !WHITE.includes(char)));
  const rest = lines.slice(first < 0 ? lines.length : first).join('\n');
  let end = rest.length;
  while (end > 0 && WHITE.includes(rest[end - 1])) {
    end--;
  }
  return rest.slice(0, end);
}

export function sourceDigest(source: string): string {
  return digestOf(normaliseSource(source));
}

function without(data: IJsonObject, ...keys: string[]): IJsonObject {
  return Object.fromEntries(Object.entries(data).filter(([key]) => !keys.includes(key)));
}

/** The digest of a stored stamp or reference, as it stands. */
export function contentDigest(data: IJsonObject): string {
  return digestOf(without(data, 'fingerprint', 'digest'));
}

/** The reference of a stored stamp: the same without its fingerprint. */
export function referenceJson(stamp: IJsonObject): IJsonObject {
  return without(stamp, 'fingerprint');
}

const known = new WeakMap<object, Map<string, IStamp | StampError>>();

/** Read a stamp or a reference; raises `StampError`. A result is kept with its object. */
export function readStamp(data: unknown, where: string): IStamp {
  if (!isObject(data)) {
    throw new StampError(`${where} is not an object`);
  }
  const results = known.get(data) ?? new Map<string, IStamp | StampError>();
  known.set(data, results);
  let found = results.get(where);
  if (found === undefined) {
    found = attempt(data, where);
    results.set(where, found);
  }
  if (found instanceof StampError) {
    throw found;
  }
  return found;
}

function attempt(data: IJsonObject, where: string): IStamp | StampError {
  try {
    return reading(where, () => parse(new Reader(data, where)));
  } catch (error) {
    if (error instanceof StampError) {
      return error;
    }
    throw error;
  }
}

function parse(reader: Reader): IStamp {
  checkSchema(reader);
  if (contentDigest(reader.data) !== reader.digest('digest')) {
    throw new StampError(
      `${reader.where} disagrees with its own digest: its content was changed; run the cell again`
    );
  }
  const digest = reader.digest('fingerprint_digest');
  const name = reader.text('name');
  const level = reader.text('level');
  if (!LEVELS.includes(level)) {
    throw new StampError(`${reader.where}: 'level' is unknown; expected ${LEVELS.join(', ')}`);
  }
  const calls = reader.subs('calls');
  if (calls.length > MAX_CALLS) {
    throw new StampError(`${reader.where} holds more than ${MAX_CALLS} calls`);
  }
  const found = calls.map(readCall);
  checkAttempts(
    found.map(call => call.attempt),
    reader.where
  );
  return {
    name,
    level,
    source: reader.digest('source'),
    model: readModel(reader.sub('model')),
    fingerprint: ownFingerprint(reader, digest),
    fingerprintDigest: digest,
    rootSeed: reader.bigInteger('root_seed'),
    calls: found,
    late: reader.texts('late'),
    selfTest: reader.text('self_test'),
    reach: reader.has('reach') ? readReach(reader.sub('reach')) : null,
    storedDigest: reader.digest('digest')
  };
}

function readReach(reader: Reader): IReach {
  return {
    tokens: reader.integer('tokens'),
    sequences: reader.integer('sequences'),
    beyond: reader.flag('beyond')
  };
}

function checkSchema(reader: Reader): void {
  const schema = reader.get('schema');
  if (schema === STAMP_SCHEMA) {
    return;
  }
  const other = typeof schema === 'string' && schema.startsWith(FAMILY);
  const version = other ? ', written by another version' : '';
  throw new StampError(
    `${reader.where} has schema ${brief(schema)}${version}; expected '${STAMP_SCHEMA}'`
  );
}

function ownFingerprint(reader: Reader, digest: string): IFingerprint | null {
  if (!reader.has('fingerprint')) {
    return null;
  }
  const found = readFingerprint(reader.get('fingerprint'));
  if (found.digest !== digest) {
    throw new StampError(`${reader.where}: the fingerprint disagrees with its digest`);
  }
  return found;
}

function readModel(reader: Reader): IModel {
  return {
    name: reader.text('name'),
    weights: reader.optionalDigest('weights'),
    tokenizer: reader.optionalDigest('tokenizer'),
    chat_template: reader.optionalDigest('chat_template'),
    adapter: reader.optionalDigest('adapter')
  };
}

/** The stored form of a model's identity. */
export function modelJson(model: IModel): IJsonObject {
  const { adapter, ...parts } = model;
  return adapter === null ? parts : { ...parts, adapter };
}

/** One line per digest of the model that differs from the recorded one. */
export function modelDifferences(reference: IModel, actual: IModel): string[] {
  const shown = (digest: string | null) => (digest === null ? 'absent' : digest.slice(0, 19));
  return PARTS.filter(part => reference[part] !== actual[part]).map(
    part =>
      `another model: the ${part.replace('_', ' ')} digest is ${shown(actual[part])}, ` +
      `recorded was ${shown(reference[part])}`
  );
}

function readCall(reader: Reader): ICall {
  const requests = reader.subs('requests').map(readRequest);
  const generations = reader.subs('generations').map(readGeneration);
  const digest = digestOf(
    generations.map(g => ({
      prompt: g.prompt,
      completion: g.completion,
      token_ids: g.tokenIds,
      finish_reason: g.finishReason
    }))
  );
  if (reader.digest('digest') !== digest) {
    throw new StampError(`${reader.where} disagrees with its generation digest`);
  }
  const batch = reader.texts('batch');
  if (batch.length !== requests.length || batch.some((d, i) => d !== requests[i].digest)) {
    throw new StampError(`${reader.where}: the batch is not the requests in order`);
  }
  const asked = requests.flatMap((r, p) => r.seeds.map((_, c) => `${p} ${c}`));
  const given = generations.map(g => `${g.prompt} ${g.completion}`);
  if (asked.length !== given.length || asked.some((pair, i) => pair !== given[i])) {
    throw new StampError(`${reader.where}: the generations do not fit the requests`);
  }
  const cached = readCached(reader, requests.length);
  return { requests, generations, digest, cached, attempt: readAttempt(reader, generations.length) };
}

function readCached(reader: Reader, requests: number): number[] {
  if (!reader.has('cached')) {
    return [];
  }
  const found = reader.integers('cached', requests - 1);
  if (found.some((index, i) => i > 0 && index <= found[i - 1])) {
    throw new StampError(`${reader.where}: the cached requests are not in order`);
  }
  return found;
}

const KINDS = ['chat', 'text', 'tokens'];

function readRequest(reader: Reader): IRequest {
  const kind = reader.text('kind');
  if (!KINDS.includes(kind)) {
    throw new StampError(`${reader.where}: 'kind' is unknown`);
  }
  const { prompt, shown } = readPrompt(reader, kind);
  const tokens = reader.digest('prompt_tokens');
  const params = readSampling(reader.sub('params'));
  const seeds = reader.bigIntegers('seeds');
  const digest = digestOf({ prompt_tokens: tokens, params, seeds });
  const stored: IJsonObject = {
    kind,
    ...prompt,
    prompt_tokens: tokens,
    prompt_length: reader.integer('prompt_length'),
    params,
    seeds,
    digest
  };
  if (reader.digest('digest') !== digest) {
    throw new StampError(`${reader.where} disagrees with its request digest`);
  }
  return { stored, params, seeds, digest, shown };
}

function readPrompt(reader: Reader, kind: string): { prompt: IJsonObject; shown: string | null } {
  if (kind === 'chat' && reader.has('messages')) {
    const messages = reader
      .subs('messages')
      .map(m => ({ role: m.text('role'), content: m.text('content') }));
    const last = messages[messages.length - 1];
    return { prompt: { messages }, shown: last ? last.content : null };
  }
  if (kind === 'text' && reader.has('prompt')) {
    const prompt = reader.text('prompt');
    return { prompt: { prompt }, shown: prompt };
  }
  if (kind === 'tokens' && reader.has('prompt_token_ids')) {
    const ids = reader.integers('prompt_token_ids');
    if (digestOf(ids) !== reader.digest('prompt_tokens')) {
      throw new StampError(`${reader.where}: the prompt disagrees with its digest`);
    }
    return { prompt: { prompt_token_ids: ids }, shown: null };
  }
  return { prompt: {}, shown: null };
}

function readSampling(reader: Reader): IJsonObject {
  const found = {
    temperature: reader.number('temperature'),
    top_p: reader.number('top_p'),
    top_k: reader.integer('top_k'),
    min_p: reader.number('min_p'),
    max_tokens: reader.integer('max_tokens'),
    min_tokens: reader.integer('min_tokens'),
    presence_penalty: reader.number('presence_penalty'),
    frequency_penalty: reader.number('frequency_penalty'),
    repetition_penalty: reader.number('repetition_penalty'),
    stop: reader.texts('stop'),
    stop_token_ids: reader.integers('stop_token_ids'),
    ignore_eos: reader.flag('ignore_eos'),
    beam_width: reader.integer('beam_width'),
    length_penalty: reader.number('length_penalty')
  };
  // A parameter of a later version makes another request of it, whatever the digests say.
  reader.nothingBut(Object.keys(found));
  return found;
}

/** Whether the most likely token is always taken. */
export function isGreedy(request: IRequest): boolean {
  return request.params.temperature === '0.0' && request.params.beam_width === 0;
}

function readGeneration(reader: Reader): IGeneration {
  const tokenIds = reader.integers('token_ids');
  const text = reader.text('text');
  const offsets = reader.integers('offsets', utf8(text).length);
  if (offsets.length !== tokenIds.length || offsets.some((o, i) => i > 0 && o < offsets[i - 1])) {
    throw new StampError(`${reader.where}: the token offsets do not fit the tokens`);
  }
  const evidence = reader.get('evidence');
  return {
    prompt: reader.integer('prompt'),
    completion: reader.integer('completion'),
    tokenIds,
    finishReason: reader.text('finish_reason'),
    text,
    offsets,
    evidence:
      evidence === undefined || evidence === null ? null : readEvidence(evidence, tokenIds.length)
  };
}

function generationJson(generation: IGeneration): IJsonObject {
  const out: IJsonObject = {
    prompt: generation.prompt,
    completion: generation.completion,
    token_ids: generation.tokenIds,
    finish_reason: generation.finishReason,
    text: generation.text,
    offsets: generation.offsets
  };
  if (generation.evidence) {
    out.evidence = evidenceJson(generation.evidence);
  }
  return out;
}

/** The digest of the content, as known here, wherever its generations were taken from. */
export function knownDigest(stamp: IStamp): string {
  return contentDigest({
    schema: STAMP_SCHEMA,
    name: stamp.name,
    level: stamp.level,
    self_test: stamp.selfTest,
    source: stamp.source,
    model: modelJson(stamp.model),
    fingerprint_digest: stamp.fingerprintDigest,
    root_seed: stamp.rootSeed,
    late: stamp.late,
    ...(stamp.reach === null ? {} : { reach: { ...stamp.reach } }),
    calls: stamp.calls.map(call => ({
      requests: call.requests.map(request => request.stored),
      batch: call.requests.map(request => request.digest),
      generations: call.generations.map(generationJson),
      digest: call.digest,
      ...(call.attempt === null ? {} : { attempt: attemptJson(call.attempt) })
    }))
  });
}

const generationDigests = new WeakMap<IStamp, string>();

/** The digest over the generation digests of all calls. */
export function generationDigest(stamp: IStamp): string {
  const kept = generationDigests.get(stamp);
  const found = kept ?? digestOf(stamp.calls.map(call => call.digest));
  generationDigests.set(stamp, found);
  return found;
}

/** Whether two stamps hold the same content, as far as this version knows it. */
export function sameContent(a: IStamp, b: IStamp): boolean {
  if (a.storedDigest === b.storedDigest) {
    return true;
  }
  // What differs in a part that is already known needs no digest of the whole.
  const parts = (s: IStamp) => [s.source, s.fingerprintDigest, generationDigest(s), s.level];
  return equal(parts(a), parts(b)) && knownDigest(a) === knownDigest(b);
}

export function generationsOf(stamp: IStamp): IGeneration[] {
  return stamp.calls.flatMap(call => [...call.generations]);
}

