// Maps of taps by layer: names of taps, and where an arrow leads. A store has `row`, `path`, `layers`, `kinds`, and taps `before` and `after` the layers.

export const kindOf = (path) => (/^layers\.\d+\./.test(path) ? path.split(".").slice(2).join(".") : path);
export const ofExpert = (path) => path.includes(".moe.experts.");

// The tap that an arrow leads to: right and left the next layer that has it, down and up the next tap of the layer.
export function stepOnMap(store, path, right, down) {
  const row = store.row(path);
  if (!row) return store.facts.paths[0] ?? null;
  const { layers } = store;
  const kind = kindOf(path);
  if (row.layer < 0) {
    const side = store.before.includes(path) ? store.before : store.after;
    if (down) return side[side.indexOf(path) + down] ?? path;
    const inward = side === store.before ? 1 : -1;
    if (right !== inward || !layers.length) return path;
    const edge = inward > 0 ? layers[0] : layers.at(-1);
    return store.kinds.map((k) => store.path(k, edge)).find(Boolean) ?? path;
  }
  if (right) {
    for (let i = layers.indexOf(row.layer) + right; i >= 0 && i < layers.length; i += right) if (store.path(kind, layers[i])) return store.path(kind, layers[i]);
    return (right > 0 ? store.after[0] : store.before.at(-1)) ?? path;
  }
  for (let j = store.kinds.indexOf(kind) + down; j >= 0 && j < store.kinds.length; j += down) if (store.path(store.kinds[j], row.layer)) return store.path(store.kinds[j], row.layer);
  return path;
}
