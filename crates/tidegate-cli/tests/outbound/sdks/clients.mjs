// Unmodified SDKs, pointed at a gateway whose URL is the argument. Prints a line for each call that ended as it should.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [gateway, modules] = process.argv.slice(2);
const require = createRequire(pathToFileURL(`${modules}/`));
const load = async (name) => import(pathToFileURL(require.resolve(name)).href);
const hello = [{ role: "user", content: "Hello" }];
const key = "the gateway has the key";

function check(name, found, expected) {
  if (JSON.stringify(found) !== JSON.stringify(expected)) {
    console.error(`${name}: ${JSON.stringify(found)} instead of ${JSON.stringify(expected)}`);
    process.exit(1);
  }
  console.log(`ok ${name}`);
}

async function collect(pages) {
  const found = [];
  for await (const item of pages) found.push(item.id);
  return found;
}

async function errorOf(call) {
  try {
    await call;
  } catch (error) {
    return error;
  }
}

async function checkOpenai() {
  const { default: OpenAI } = await load("openai");
  const client = new OpenAI({ baseURL: `${gateway}/openai`, apiKey: key });
  const say = async (model, maxRetries = 2) =>
    (await client.chat.completions.create({ model, messages: hello }, { maxRetries })).choices[0].message.content;
  // The gateway waits for the limit. It doesn't repeat a failed POST, but the SDK does.
  check("openai throttled", await say("node-throttled", 0), "Hello you");
  for (const model of ["m", "node-failing"]) check(`openai ${model}`, await say(model), "Hello you");
  const stream = await client.chat.completions.create({ model: "m", messages: hello, stream: true });
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0].delta.content;
  check("openai stream", text, "Hello you");
  check("openai pages", await collect(client.files.list()), [1, 2, 3, 4, 5, 6].map((n) => `file-${n}`));
  check("openai error", (await errorOf(say("broken"))).message.includes("an internal error"), true);
  const spent = new OpenAI({ baseURL: `${gateway}/openai-spent`, apiKey: key });
  await spent.files.list();
  const { code, type, message } = await errorOf(spent.files.list());
  const why = "429 openai-spent: the quota `openai-spent` is spent";
  check("openai refusal", [code, type, message], ["rate_limit_exceeded", "rate_limit_error", why]);
}

async function checkAnthropic() {
  const { default: Anthropic } = await load("@anthropic-ai/sdk");
  const client = new Anthropic({ baseURL: `${gateway}/anthropic`, apiKey: key });
  const say = async (model, maxRetries = 2) =>
    (await client.messages.create({ model, max_tokens: 9, messages: hello }, { maxRetries })).content[0].text;
  check("anthropic throttled", await say("node-throttled", 0), "Hello you");
  for (const model of ["m", "node-failing"]) check(`anthropic ${model}`, await say(model), "Hello you");
  const stream = client.messages.stream({ model: "m", max_tokens: 9, messages: hello });
  check("anthropic stream", await stream.finalText(), "Hello you");
  check("anthropic pages", await collect(client.models.list()), [1, 2, 3, 4, 5, 6].map((n) => `m${n}`));
  check("anthropic error", (await errorOf(say("broken"))).message.includes("an internal error"), true);
  const spent = new Anthropic({ baseURL: `${gateway}/anthropic-spent`, apiKey: key });
  await spent.models.list();
  const { type, apiMessage } = await errorOf(spent.models.list());
  const why = "anthropic-spent: the quota `anthropic-spent` is spent";
  check("anthropic refusal", [type, apiMessage], ["rate_limit_error", why]);
}

async function checkGithub() {
  const { Octokit } = await load("octokit");
  const options = { retry: { enabled: false }, throttle: { enabled: false } };
  const client = new Octokit({ baseUrl: `${gateway}/github`, auth: key, ...options });
  check("github user", (await client.rest.users.getAuthenticated()).data.login, "o");
  for (const repo of ["node-throttled", "node-failing"]) {
    check(`github ${repo}`, (await client.rest.repos.get({ owner: "o", repo })).data.full_name, "o/r");
  }
  const issues = await client.paginate(client.rest.issues.listForRepo, { owner: "o", repo: "r", per_page: 2 });
  check("github pages", issues.map((issue) => issue.number), [1, 2, 3, 4, 5, 6]);
}

await checkOpenai();
await checkAnthropic();
await checkGithub();
