// Signed numbers: the PuOr scale (65 values of matplotlib's PuOr_r, checked by tests/widgets/test_palette.py), zero in the middle.

const PUOR =
  "2d004b330655390c5e3f12684518714c1f7b522584582e8c5f3a916646976d529c745ea27b6aa88275ad8a7eb39287b99990bfa198c5a9a1cbb1aad1" +
  "b7b1d5bdb9d9c3c0ddc9c8e1cfcfe5d5d6e9dadcecdfe1eee4e5f0e9eaf2eeeef3f3f3f5f7f7f6f8f3ecf9efe1faecd7fce8cdfde5c3fee1b9fedbac" +
  "fed59ffecf92fdc885fdc278fdbc6bfbb55ef7ac52f2a446ee9b39e9932de58a20e08214d97b12d27510cb6e0dc4680bbd6109b65a07ae5506a65107" +
  "9e4c079548078d4307853e087f3b08";

// −1 … 1
export const signedColour = (v) => {
  const i = Math.max(0, Math.min(64, Math.round(32 + 32 * v)));
  return "#" + PUOR.slice(6 * i, 6 * i + 6);
};
