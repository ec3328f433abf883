/* Light, dark or as the system says: one choice for all pages. */

function applyTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
}

function nextTheme() {
  const themes = ["auto", "light", "dark"];
  const theme = themes[(themes.indexOf(document.documentElement.dataset.theme) + 1) % themes.length];
  applyTheme(theme);
  try { localStorage.setItem("sf-theme", theme); } catch { /* a page from a file may have no storage: then the choice is for now */ }
}

function rememberedTheme() {
  try { return localStorage.getItem("sf-theme") ?? "auto"; } catch { return "auto"; }
}

function beginTheme() {
  applyTheme(rememberedTheme());
  byId("theme").addEventListener("click", nextTheme);
}
