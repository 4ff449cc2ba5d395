// A client in C++, from code that protoc generates of the .proto file.
//
//   client ADDRESS PROMPT MAX_TOKENS [CANCEL_AFTER_TOKENS]
//
// Prints the text as it comes, then a line of what came and the status at the end.

#include <grpcpp/grpcpp.h>

#include <cstdlib>
#include <iostream>
#include <string>

#include "protos/quire/inference/v1/inference.grpc.pb.h"

namespace pb = quire::inference::v1;

int main(int argc, char** argv) {
    if (argc < 4) {
        std::cerr << "usage: client ADDRESS PROMPT MAX_TOKENS [CANCEL_AFTER_TOKENS]\n";
        return 2;
    }
    const std::string address = argv[1];
    const int cancel_after = argc > 4 ? std::atoi(argv[4]) : 0;

    // gRPC tries again by itself while no worker is ready, and never after the first message.
    grpc::ChannelArguments arguments;
    arguments.SetServiceConfigJSON(R"({"methodConfig": [{
        "name": [{"service": "quire.inference.v1.GenerationService"}],
        "retryPolicy": {"maxAttempts": 4, "initialBackoff": "0.2s", "maxBackoff": "5s",
                        "backoffMultiplier": 2, "retryableStatusCodes": ["UNAVAILABLE"]}}]})");
    const auto channel =
        grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
    const auto stub = pb::GenerationService::NewStub(channel);

    pb::GenerateRequest request;
    request.set_text(argv[2]);
    request.mutable_sampling()->set_temperature(0);
    request.mutable_stopping()->set_max_tokens(std::atoi(argv[3]));
    request.mutable_stopping()->set_ignore_eos(true);

    grpc::ClientContext context;
    const auto reader = stub->Generate(&context, request);
    pb::GenerateResponse response;
    std::string ids, reason = "none";
    int num_tokens = 0;
    while (reader->Read(&response)) {
        if (response.has_delta()) {
            std::cout << response.delta().text() << std::flush;
            for (const auto id : response.delta().token_ids()) {
                ids += (ids.empty() ? "" : ",") + std::to_string(id);
            }
            num_tokens += response.delta().token_ids_size();
            if (cancel_after > 0 && num_tokens >= cancel_after) context.TryCancel();
        } else if (response.has_finished()) {
            reason = pb::FinishReason_Name(response.finished().reason());
        }
    }
    const grpc::Status status = reader->Finish();
    std::cout << "\nids=" << ids << " reason=" << reason << " status=" << status.error_code();
    if (!status.ok()) std::cout << " (" << status.error_message() << ")";
    std::cout << std::endl;
    return status.ok() ? 0 : 1;
}
