// As much of a browser as page.js asks for, for its test: it answers /status with the page in the environment, and
// prints what would be seen.
"use strict";
const markup = [];
class Element {
  constructor(tag) {
    this.tag = tag;
    this.children = [];
    this.hidden = false;
    this.className = "";
    this.text = "";
  }
  set textContent(text) {
    this.children = [];
    this.text = String(text);
  }
  get textContent() {
    return this.children.length ? this.children.map((it) => it.textContent).join(" | ") : this.text;
  }
  set innerHTML(text) { markup.push(text); }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; }
}
const places = new Map(JSON.parse(process.env.IDS).map((id) => [id, new Element(id)]));
globalThis.document = {
  hidden: false,
  title: "",
  createElement: (tag) => new Element(tag),
  getElementById: (id) => {
    if (!places.has(id)) throw new Error("no element " + id);
    return places.get(id);
  },
};
const asked = [];
globalThis.fetch = async (path) => {
  asked.push(path);
  const body = process.env.STATUS;
  const ok = process.env.CODE === "200";
  return { ok, json: async () => JSON.parse(body), text: async () => body };
};
// Once is enough.
globalThis.setTimeout = () => {};
process.on("exit", () => {
  const show = (id) => {
    const place = places.get(id);
    const rows = place.children.length ? place.children : [place];
    for (const row of rows) {
      const mark = row.className ? " (" + row.className + ")" : "";
      console.log(id + (place.hidden ? " (hidden)" : "") + ": " + row.textContent + mark);
    }
  };
  for (const id of ["node", "summary", "trouble", "units", "limits", "limiting"]) show(id);
  console.log("asked: " + asked.join(" ") + ", title: " + document.title + ", markup: " + markup.length);
});
