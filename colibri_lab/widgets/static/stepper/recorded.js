// A saved page holds the moments of a walk: the transport goes through them, and nothing is run.

export class Recorded {
  constructor() {
    this.moments = [];
    this.at = 0;
  }

  add(moment) {
    this.moments.push(moment);
    this.at = this.moments.length - 1;
  }

  get now() {
    return this.moments[this.at];
  }

  // On (1) or back (−1) to the next kept moment that completes a unit; else to the end of what is kept.
  move(direction, unit) {
    const ends = { expert: ["expert"], layer: ["residual", "logits"], token: ["logits"] }[unit];
    let at = this.at;
    do at += direction;
    while (this.moments[at] && ends && !ends.includes(this.moments[at].place.stage));
    const last = direction > 0 ? this.moments.length - 1 : 0;
    const before = this.at;
    this.at = Math.max(0, Math.min(this.moments.length - 1, this.moments[at] ? at : last));
    return this.at !== before;
  }

  find(stage, layer) {
    const at = this.moments.findLastIndex(({ place }) => place.stage === stage && (place.layer ?? null) === (layer ?? null));
    if (at < 0) return false;
    this.at = at;
    return true;
  }

  end() {
    this.at = this.moments.length - 1;
  }
}
