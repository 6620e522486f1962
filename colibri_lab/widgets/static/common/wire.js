// Arrays that came from Python: see _wire.py.

const TYPES = { uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, int32: Int32Array, float32: Float32Array };

// Specs and buffers of one message as typed arrays by name (copied: a DataView may start anywhere).
export function unpack(specs, buffers) {
  const arrays = {};
  specs.forEach(({ name, dtype }, i) => {
    const view = buffers[i];
    const bytes = view.buffer ? view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength) : view;
    arrays[name] = new TYPES[dtype](bytes);
  });
  return arrays;
}
