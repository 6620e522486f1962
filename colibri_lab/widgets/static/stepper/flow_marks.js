// What the layer picture shows in the place of a number.

// A value that is no ordinary number, as a mark in ink and page colour.
export function strange(v, x, y, w, h) {
  const cx = x + w / 2;
  const cy = y + h / 2;
  const r = Math.min(w, h) * 0.3;
  const up = v === -Infinity ? -1 : 1;
  if (Number.isNaN(v))
    return `<rect x="${x + 0.75}" y="${y + 0.75}" width="${w - 1.5}" height="${h - 1.5}" fill="var(--markp)" stroke="var(--mark)" stroke-width="1.5"/><path d="M${cx - r} ${cy - r}L${cx + r} ${cy + r}M${cx + r} ${cy - r}L${cx - r} ${cy + r}" stroke="var(--mark)" stroke-width="${w > 8 ? 2 : 1.2}"/>`;
  return `<rect x="${x}" y="${y}" width="${w}" height="${h}" fill="var(--mark)"/><path d="M${cx - 1.2 * r} ${cy + up * 0.8 * r}H${cx + 1.2 * r}L${cx} ${cy - up * r}Z" fill="var(--markp)"/>`;
}

export function waiting(moment, stage) {
  if (!moment.head.moe.includes(moment.layer)) return "a dense layer: no router, no experts";
  return moment.done(stage, moment.layer, null) ? "not kept by this session: capture=\"moe\" keeps it" : `the ${stage} of this layer has not run yet`;
}
