// What every program of a library shares: its arguments and its prompts.
export const [url, api, kind] = process.argv.slice(2);
export const v1 = `${url}/v1`;
export const model = "demo";
export const prompt = "Say hi.";
export const long = "word ".repeat(6000);
export const only = {
  type: "object",
  properties: { city: { type: "string", enum: ["Graz"] } },
  required: ["city"],
  additionalProperties: false,
};

export function check(condition, what) {
  if (!condition) throw new Error(`not as it should be: ${what}`);
}

// Run what this program has for the kind that was asked for.
export async function run(kinds) {
  await kinds[kind]();
  process.exit(0);
}
