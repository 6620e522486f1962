// What limits each stage: its work per byte against what the machine reads and computes at most.
export const roofline = {
  name: "roofline",
  html: (panel) => (panel ? "" : '<p class="q">No stage was timed.</p>'),
};
