// Shows /status as `gpu-bridge status` does, and asks again while somebody looks.
"use strict";

// How often the daemon is asked, in milliseconds. It answers from memory.
const PERIOD = 2000;

const place = (id) => document.getElementById(id);

// Texts come from the cluster: they are put in as text, never as markup.
function cell(row, text, kind) {
  const td = document.createElement("td");
  td.textContent = text;
  if (kind) td.className = kind;
  row.append(td);
}

function seconds(time) {
  return time.replace(/\.\d+/, "");
}

// Who has it, in the words of `gpu-bridge status`.
function holder(hold) {
  const name = (of) => of.namespace + "/" + of.name;
  const named = hold.pod ? "pod " + name(hold.pod) : hold.claim ? "claim " + name(hold.claim) : null;
  switch (hold.cause) {
    case undefined:
    case null:
      return named || "a counted pod (not seen yet)";
    case "Lingering":
      return (named || "a counted pod") + " (ended, its process runs on)";
    case "UnknownUnitOf":
      return named ? "perhaps " + named : "an unknown process";
    default:
      return "an unknown process";
  }
}

function line(unit, state, who, face, since) {
  const row = document.createElement("tr");
  if (!unit.present || unit.lacks || unit.fault || state === "Foreign" || state === "Lost") row.className = "attention";
  cell(row, unit.device);
  cell(row, unit.unit, "id");
  cell(row, unit.product);
  cell(row, state);
  cell(row, who);
  cell(row, face);
  cell(row, since);
  return row;
}

function lines(unit) {
  if (unit.holds.length === 0) return [line(unit, unit.state, "-", unit.side, "-")];
  return unit.holds.map((hold) => {
    const trouble = !unit.present ? ", GPU lost" : unit.fault ? ", GPU faulty" : "";
    const state = hold.phase + trouble;
    return line(unit, state, holder(hold), hold.face || "-", seconds(hold.since));
  });
}

function free(offers) {
  const counted = offers.legacy.filter((id) => id.free && id.health === "Healthy").length;
  const claims = (offers.dra || []).filter((device) => !device.taint && !device.heldByClaim).length;
  return "free: " + counted + " for counted pods, " + claims + " for claims";
}

function limit(condition) {
  const word = condition.reason || condition.name;
  const item = document.createElement("li");
  const opens = word + ": ";
  const message = condition.message.startsWith(opens) ? condition.message.slice(opens.length) : condition.message;
  item.textContent = word + " since " + seconds(condition.since) + ": " + message;
  return item;
}

function show(page) {
  place("node").textContent = page.node;
  document.title = page.node + " - gpu-bridge";
  const caps = "limits: legacy " + (page.limits.legacy ?? "none") + ", dra " + (page.limits.dra ?? "none");
  place("summary").textContent =
    "mode " + page.mode + ", " + caps + "; " + free(page.offers) +
    "; ledger " + page.standing + ", generation " + page.generation + "; version " + page.version;
  place("units").replaceChildren(...page.units.flatMap(lines));
  const limiting = page.conditions.filter((condition) => condition.limits || !condition.ok);
  place("limiting").replaceChildren(...limiting.map(limit));
  place("limits").hidden = limiting.length === 0;
  place("age").textContent = "as of " + new Date().toLocaleTimeString();
}

function trouble(text) {
  place("trouble").textContent = text;
  place("trouble").hidden = text === "";
}

async function ask() {
  try {
    const answer = await fetch("status", { cache: "no-store" });
    if (answer.ok) {
      show(await answer.json());
      trouble("");
    } else {
      trouble("The daemon says: " + (await answer.text()));
    }
  } catch (error) {
    trouble("The daemon does not answer; what stands below is from before.");
  }
}

async function follow() {
  if (!document.hidden) await ask();
  setTimeout(follow, PERIOD);
}

follow();
