// ./dev/X: checks the variants of an operation and, on a GPU, times them; `--help` lists the options.
#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdio>
#include <string>

#include "dev/lab/gpu.h"
#include "dev/lab/session.h"
#include "llmc/core/error.h"
#include "llmc/core/text.h"

int main(int argc, char** argv) try {
    const lab::Operation& operation = lab::operations().front();
    lab::SessionOptions options;
    std::string seed;
    bool check_only = false;
    CLI::App app{operation.name + ": checks and times its kernel variants, from naive to best"};
    app.add_option("variants", options.variants, "numbers of the variants to run (default: all)");
    app.add_option("--dtype", options.dtype, "dtype of the tensors")
        ->check(CLI::IsMember({"bf16", "fp32", "fp16"}))
        ->capture_default_str();
    const CLI::Option* const seed_option = app.add_option(
        "--seed", seed,
        "seed of the inputs, to repeat a run; on the CPU also of the order of threads (0: in the "
        "order of their numbers)");
    app.add_flag("--check", check_only, "does not time, even on a GPU");
    app.add_option("--json", options.json, "file that gets a line for each timing");
    try {
        app.parse(argc, argv);
    } catch (const CLI::Success& asked) {  // --help
        return app.exit(asked);
    } catch (const CLI::ParseError& fault) {
        llmc::user_error("{}; --help lists the options", fault.what());
    }
    if (seed_option->count() > 0) {
        const auto number = llmc::whole_number<std::uint64_t>(seed);
        if (!number) llmc::user_error("--seed '{}' is no seed; give a whole number, 0 or more", seed);
        options.seed = *number;
    }
    options.time = !check_only;
    lab::use_executor(options.seed);
    return lab::run_session(operation, options) ? 0 : 1;
} catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
}
