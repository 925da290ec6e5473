// op_probe OP DTYPE IN.safetensors OUT.safetensors
//
// Runs an operation on the CPU device, so that a script can compare it with another implementation. It runs
// all cases of IN; case_file.h describes the file, run_op.h names the operands. OUT receives the results of
// each case.
#include <fmt/format.h>

#include <cstdio>
#include <exception>

#include "test/probe/case_file.h"
#include "test/probe/run_op.h"

namespace {

using namespace llmc;

DType parse_dtype(std::string_view name) {
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16, DType::fp64, DType::int32})
        if (name_of(dtype) == name) return dtype;
    user_error("there is no dtype {}", name);
}

void run(const char* op, const char* dtype, const char* input_file, const char* output_file) {
    const auto device = make_cpu_device();
    std::map<std::string, probe::HostTensors> results;
    for (const auto& [name, inputs] : probe::read_cases(input_file)) {
        try {
            results[name] = probe::run_op(*device, op, parse_dtype(dtype), inputs);
        } catch (const std::exception& error) {
            user_error("{} in {}, case {}: {}", op, dtype, name, error.what());
        }
    }
    probe::write_cases(output_file, results);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 5) {
        fmt::print(stderr, "usage: op_probe OP DTYPE IN.safetensors OUT.safetensors\n");
        return 1;
    }
    try {
        run(argv[1], argv[2], argv[3], argv[4]);
    } catch (const std::exception& error) {
        fmt::print(stderr, "error: {}\n", error.what());
        return 1;
    }
}
