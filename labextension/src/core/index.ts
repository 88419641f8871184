/** The pure part: no Jupyter, no DOM, no clock. It mirrors `jupyter_detllm/core`. */
export * from './canonical';
export * from './compare';
export * from './evidence';
export * from './fingerprint';
export * from './magicline';
export * from './notebook';
export * from './policy';
export * from './promotion';
export * from './reader';
export * from './sha256';
export * from './showing';
export * from './stamp';
export * from './verdict';
