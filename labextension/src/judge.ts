/** Calls of the server part of this package, which judges and promotes. */
import { ServerConnection } from '@jupyterlab/services';

import { IJsonObject, mapping } from './core/json';
import { IAnswer, IQuestion, encode } from './core/protocol';

const PATH = 'jupyter-detllm/judge';
const MISSING =
  'the Jupyter server does not judge: expected jupyter-detllm in its environment, ' +
  'and its server extension enabled';

/** The server has no such part. */
export class MissingError extends Error {}

export class JudgeClient {
  constructor(private readonly settings: ServerConnection.ISettings) {}

  /** Ask; an error's message says on one line why there are no verdicts. */
  async judge(question: IQuestion): Promise<IAnswer> {
    let response = await this.send(question);
    if (response.status === 409) {
      // It was restarted, or needed the room.
      this.digests = new WeakMap();
      response = await this.send(question);
    }
    if (response.status === 404) {
      throw new MissingError(MISSING);
    }
    if (!response.ok) {
      throw new Error(await reason(response));
    }
    const answer: IAnswer = await response.json();
    this.sent.forEach((cell, i) => this.digests.set(cell, answer.digests[i]));
    return answer;
  }

  private async send(question: IQuestion): Promise<Response> {
    const { body, sent } = encode(question, cell => this.digests.get(cell));
    this.sent = sent;
    const url = `${this.settings.baseUrl.replace(/\/$/, '')}/${PATH}`;
    return ServerConnection.makeRequest(url, { method: 'POST', body }, this.settings);
  }

  /** Of the cells that the server holds; a cell that changed is another object. */
  private digests = new WeakMap<IJsonObject, string>();
  private sent: readonly IJsonObject[] = [];
}

async function reason(response: Response): Promise<string> {
  const data = mapping(await response.json().catch(() => null));
  const message = typeof data.message === 'string' ? data.message : response.statusText;
  return `the Jupyter server answered ${response.status}: ${message.slice(0, 300)}`;
}
