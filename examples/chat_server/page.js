// SPDX-License-Identifier: Apache-2.0
"use strict";

const find = (id) => document.getElementById(id);
const talk = find("talk"), text = find("text"), rows = find("requests").tBodies[0];
let messages = [], asked = 0, under_way = null;

const make = (name, parent, content = "", kind = "") => {
  const made = parent.appendChild(document.createElement(name));
  made.textContent = content;
  made.className = kind;
  return made;
};

const svg = (name, parent, attributes) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return parent.appendChild(made);
};

/** Tell what a request took: a line below its answer, and a row of the table. */
function show(told, below) {
  const { prompt_tokens: prompt, completion_tokens: said } = told.usage;
  const loaded = told.usage.prompt_tokens_details.cached_tokens;
  const first = `${(told.first_token_s * 1000).toFixed(1)} ms`;
  make("small", below, `${loaded} of ${prompt} tokens loaded, first token after ${first}`);
  rows.querySelector(".none")?.remove();
  const row = rows.insertRow(0);
  for (const each of [++asked, prompt, loaded, prompt - loaded, said, first]) {
    row.insertCell().textContent = each;
  }
  const cell = row.insertCell();
  cell.className = "wide";
  const label = `${loaded} tokens loaded, ${prompt - loaded} computed`;
  const bar = svg("svg", cell, {
    viewBox: `0 0 ${prompt} 1`, preserveAspectRatio: "none", role: "img", "aria-label": label,
  });
  svg("rect", bar, { class: "loaded", width: loaded, height: 1 });
  svg("rect", bar, { class: "computed", x: loaded, width: prompt - loaded, height: 1 });
}

/** Yield what a stream of events tells, one by one. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function answer(messages, place, said, signal) {
  const body = JSON.stringify({ messages, stream: true, max_tokens: find("tokens").valueAsNumber });
  const response = await fetch("v1/chat/completions", { method: "POST", body, signal });
  if (!response.ok) throw new Error((await response.json()).error.message);
  for await (const told of events(response)) {
    if (told.error) throw new Error(told.error.message);
    said.content += told.choices[0].delta.content;
    place.firstChild.data = said.content;
    if (told.usage) show(told, place);
  }
}

async function send() {
  if (under_way || !text.value.trim()) return;
  const conversation = messages;
  conversation.push({ role: "user", content: text.value });
  make("li", talk, text.value, "user");
  text.value = "";
  under_way = new AbortController();
  find("send").disabled = !(find("stop").disabled = false);
  const said = { role: "assistant", content: "" };
  const place = make("li", talk, " ", "assistant");
  place.scrollIntoView({ block: "nearest" });
  try {
    await answer(conversation, place, said, under_way.signal);
  } catch (error) {
    place.classList.add("error");
    make("small", place, error.name === "AbortError" ? "Stopped." : error.message);
  }
  conversation.push(said);
  under_way = null;
  find("send").disabled = !(find("stop").disabled = true);
  text.focus();
}

find("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
find("stop").addEventListener("click", () => under_way?.abort());
find("anew").addEventListener("click", () => {
  under_way?.abort();
  messages = [];
  talk.replaceChildren();
  text.focus();
});
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    find("ask").requestSubmit();
  }
});
