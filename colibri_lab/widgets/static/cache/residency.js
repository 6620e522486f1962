// In memory now: the share of each expert's pages, layer by expert. `panel` is what Python sent, null where it sent nothing.
export const residency = {
  name: "residency",
  html: (panel) => (panel ? "" : '<p class="q">Which weights are in memory is asked of an open model: <code class="code">lab.CacheLab(session)</code></p>'),
};
