/** The pure part: no Jupyter, no DOM, no clock. Verdicts and promotion are the server's. */
export * from './json';
export * from './protocol';
export * from './sha256';
export * from './source';
export * from './status';
