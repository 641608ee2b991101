// Asks the gate through ioredis.
import assert from "node:assert";
import { createRequire } from "node:module";

const [, , port, packages] = process.argv;
const { Redis } = createRequire(`${packages}/`)("ioredis");
const client = new Redis({ port: Number(port), password: "a password", connectionName: "a-test" });

assert.equal(await client.ping(), "PONG");
assert.equal(await client.client("GETNAME"), "a-test");
const check = async (key) => {
  const answer = await client.call("TG.CHECK", "login", "KEY", key);
  return Array.isArray(answer)
    ? Object.fromEntries(Array.from({ length: answer.length / 2 }, (_, n) => [answer[2 * n], answer[2 * n + 1]]))
    : answer;
};
const first = await check("node");
assert.equal(first.remaining, 4);
assert.ok(first.allowed);
const pipeline = client.pipeline();
for (let n = 0; n < 1000; n++) pipeline.call("TG.CHECK", "login", "KEY", "node-pipeline");
const answers = await pipeline.exec();
const allowed = answers.map(([, answer]) => answer[answer.indexOf("allowed") + 1]);
assert.equal(allowed.filter(Boolean).length, 5);
await assert.rejects(client.call("TG.CHECK", "lgoin", "KEY", "a"), /did you mean "login"\?/);
await client.quit();
console.log("ok");
