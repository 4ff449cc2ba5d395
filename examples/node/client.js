// A client in another language, straight from the .proto file, without generated code.
//
//   node client.js ADDRESS INFERENCE_PROTO PROMPT MAX_TOKENS [CANCEL_AFTER_TOKENS]
//
// Prints one JSON object: what came, and the status at the end.
'use strict';

const grpc = require('@grpc/grpc-js');
const protoLoader = require('@grpc/proto-loader');

const [address, protoFile, text, maxTokens, cancelAfter] = process.argv.slice(2);
const definition = protoLoader.loadSync(protoFile, { keepCase: true, enums: String, oneofs: true });
const { GenerationService } = grpc.loadPackageDefinition(definition).quire.inference.v1;
const client = new GenerationService(address, grpc.credentials.createInsecure());

const result = { started: false, token_ids: [], text: '', reason: null, status: null };
const call = client.Generate({
  text,
  sampling: { temperature: 0 },
  stopping: { max_tokens: Number(maxTokens), ignore_eos: true },
});

call.on('data', ({ event, started, delta, finished }) => {
  if (event === 'started') {
    result.started = started.num_prompt_tokens > 0;
  } else if (event === 'delta') {
    result.token_ids.push(...delta.token_ids);
    result.text += delta.text;
    if (cancelAfter && result.token_ids.length >= Number(cancelAfter)) call.cancel();
  } else if (event === 'finished') {
    result.reason = finished.reason;
  }
});
call.on('error', () => {}); // 'status' tells it too
call.on('status', ({ code }) => {
  result.status = Object.keys(grpc.status).find((name) => grpc.status[name] === code);
  console.log(JSON.stringify(result));
  client.close();
});
