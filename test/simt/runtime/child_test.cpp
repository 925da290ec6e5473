#include "simt/runtime/child.h"

#include <malloc.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>

namespace runtime_test {
namespace {

constexpr int seeds = 10;

struct Process {
    pid_t id;
    int errors;  // to read from
};

Process start(const Environment& environment, const Body& body) {
    std::array<int, 2> pipe_ends{};
    if (pipe(pipe_ends.data()) != 0) throw std::runtime_error("no pipe");
    std::fflush(nullptr);
    const pid_t id = fork();
    if (id != 0) {
        close(pipe_ends[1]);
        return {id, pipe_ends[0]};
    }
    dup2(pipe_ends[1], STDERR_FILENO);
    close(pipe_ends[0]);
    close(pipe_ends[1]);
    mallopt(M_PERTURB, 165);  // freed memory changes, so that a copy which has yet to read it is seen
    for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
    std::exit(body() ? 0 : wrong);
}

Outcome finish(const Process& process) {
    Outcome outcome{};
    std::array<char, 4096> part{};
    ssize_t bytes = 0;
    while ((bytes = read(process.errors, part.data(), part.size())) > 0) {
        outcome.errors.append(part.data(), static_cast<std::size_t>(bytes));
    }
    close(process.errors);
    int status = 0;
    waitpid(process.id, &status, 0);
    outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return outcome;
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const Outcome& outcome) {
    return out << "exit status " << outcome.status << ", saying: " << outcome.errors;
}

Outcome run_process(const Environment& environment, const Body& body) {
    return finish(start(environment, body));
}

std::vector<Outcome> run_processes(int count, const Environment& environment,
                                   const std::function<bool(int)>& body) {
    std::vector<Process> processes;
    for (int i = 0; i < count; ++i) processes.push_back(start(environment, [&] { return body(i); }));
    std::vector<Outcome> outcomes;
    for (const Process& process : processes) outcomes.push_back(finish(process));
    return outcomes;
}

testing::AssertionResult is_right_in_any_order(const Body& body) {
    for (int seed = 0; seed < seeds; ++seed) {
        const Outcome outcome = run_process({{"SIMT_SEED", std::to_string(seed)}}, body);
        if (!outcome.good()) return testing::AssertionFailure() << "SIMT_SEED=" << seed << ": " << outcome;
    }
    return testing::AssertionSuccess();
}

testing::AssertionResult goes_wrong_in_some_order(const Body& body) {
    for (int seed = 0; seed < seeds; ++seed) {
        const Outcome outcome = run_process({{"SIMT_SEED", std::to_string(seed)}}, body);
        if (outcome.status == wrong) return testing::AssertionSuccess();
        if (!outcome.good()) return testing::AssertionFailure() << "SIMT_SEED=" << seed << ": " << outcome;
    }
    return testing::AssertionFailure() << "right in " << seeds << " orders";
}

bool is_last_error(cudaError_t error) {
    const cudaError_t first = cudaGetLastError();
    return first == error && cudaGetLastError() == cudaSuccess;
}

void must(cudaError_t error) {
    if (error == cudaSuccess) return;
    std::fprintf(stderr, "%s\n", cudaGetErrorName(error));
    std::exit(1);
}

}  // namespace runtime_test
