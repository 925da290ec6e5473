#include "llmc/comm/launcher.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "llmc/comm/bootstrap.h"
#include "llmc/comm/socket.h"
#include "llmc/comm/transport.h"
#include "llmc/core/error.h"
#include "llmc/core/standard_streams.h"
#include "llmc/core/text.h"

namespace llmc {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int most_processes = 1024;
// How long the other ranks may run after one has failed. They usually end within a second.
constexpr std::chrono::seconds time_to_report{10};
// A terminal and a scheduler may send one request several times at once (stop.cpp uses the same time).
constexpr std::chrono::milliseconds same_request{100};
constexpr std::array stop_signals = {SIGINT, SIGHUP, SIGTERM, SIGUSR1};

// The variables by which other launchers describe a job. The ranks must not believe that they belong to it.
constexpr std::array foreign_variables = {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMIX_RANK",
                                          "PMI_RANK", "TORCHELASTIC_USE_AGENT_STORE"};

bool is_ignored(int number) {
    struct sigaction action {};
    sigaction(number, nullptr, &action);
    return action.sa_handler == SIG_IGN;
}

// The program's own file. With /proc/self/exe alone, the ranks would be called "exe".
std::string program_file() {
    std::error_code error;
    const std::filesystem::path path = std::filesystem::read_symlink("/proc/self/exe", error);
    return error ? "/proc/self/exe" : path.string();
}

// One rank's process. The descriptor can be polled: it is readable when the process has ended.
class Process {
  public:
    Process(pid_t id, Socket descriptor) : id_(id), descriptor_(std::move(descriptor)) {}

    int descriptor() const { return descriptor_.file(); }
    bool runs() const { return static_cast<bool>(descriptor_); }
    void signal(int number) const {
        if (runs()) kill(id_, number);
    }
    // Its status if it has ended: as its own, or 128 plus the number of the signal that ended it.
    std::optional<int> ended() {
        int status = 0;
        if (!runs() || waitpid(id_, &status, WNOHANG) != id_) return std::nullopt;
        descriptor_.close();
        return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    }

  private:
    pid_t id_;
    Socket descriptor_;
};

// A job: its ranks, and the signals of the launcher. Constructed once in a process.
class LocalJob {
  public:
    explicit LocalJob(char** argv) : argv_(argv) {
        sigset_t set{};
        sigemptyset(&set);
        for (const int number : stop_signals)
            if (!is_ignored(number)) sigaddset(&set, number);
        if (!is_ignored(SIGTSTP)) sigaddset(&set, SIGTSTP);
        sigprocmask(SIG_BLOCK, &set, &mask_before_);
        signals_ = Socket(signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
        if (!signals_) user_error("cannot receive signals: {}", std::strerror(errno));
    }
    ~LocalJob() { kill_all(); }
    LocalJob(const LocalJob&) = delete;
    LocalJob& operator=(const LocalJob&) = delete;

    // Runs all ranks to their end, and returns the status of the job.
    int run(int processes) {
        {
            // Rank 0 takes over a socket that listens already, so no other program can take its port.
            const Listener door(0);
            for (int rank = 0; rank < processes; ++rank) start(rank, processes, door);
        }
        while (count_running() > 0) {
            std::vector<pollfd> files = {{signals_.file(), POLLIN, 0}};
            for (const Process& rank : ranks_) files.push_back({rank.descriptor(), POLLIN, 0});
            const bool may_give_up = failed_at_ && !has_given_up_;
            const int limit = may_give_up ? milliseconds_until(*failed_at_ + time_to_report) : -1;
            ::poll(files.data(), files.size(), limit);
            receive_signals();
            take_status();
            if (may_give_up && Clock::now() >= *failed_at_ + time_to_report) give_up();
        }
        name_killed_rank("");
        // Ranks that are killed leave their progress line on the terminal.
        const std::string_view erase = line_start(STDOUT_FILENO);
        if (status_ != 0 || killed_by_) std::fwrite(erase.data(), 1, erase.size(), stdout);
        return killed_by_ ? 128 + *killed_by_ : status_;
    }

  private:
    void start(int rank, int processes, const Listener& door) {
        const pid_t launcher = getpid();
        const pid_t id = fork();
        if (id < 0) {
            user_error("cannot start process {} of {}: {}; give a smaller --processes", rank + 1, processes,
                       std::strerror(errno));
        }
        if (id == 0) become_rank(rank, processes, door, launcher);
        Socket descriptor(static_cast<int>(syscall(SYS_pidfd_open, id, 0)));
        if (!descriptor) {
            const int error = errno;
            kill(id, SIGKILL);
            user_error("cannot watch process {} of {}: {}; {}", rank + 1, processes, std::strerror(error),
                       error == ENOSYS ? "--processes needs Linux 5.3 or newer; use mpirun"
                                       : "give a smaller --processes");
        }
        ranks_.emplace_back(id, std::move(descriptor));
    }

    // In the new process: becomes the program, as rank `rank`.
    [[noreturn]] void become_rank(int rank, int processes, const Listener& door, pid_t launcher) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != launcher) _exit(1);  // it is gone already
        // In a session of its own, a rank gets no signals of the terminal, and may write to it from the
        // background.
        setsid();
        // The launcher sends this signal only when it must be handled, even if the launcher itself ignores
        // it.
        std::signal(SIGUSR1, SIG_DFL);
        // A signal that comes before the rank handles it would kill it, and the others would wait for it.
        sigset_t mask = mask_before_;
        for (const int number : stop_signals) sigaddset(&mask, number);
        sigprocmask(SIG_SETMASK, &mask, nullptr);
        // Only rank 0 has standard input. From a terminal, no process in the background may read.
        const bool reads = rank == 0 && !isatty(STDIN_FILENO);
        if (!reads && std::freopen("/dev/null", "r", stdin) == nullptr) _exit(1);
        for (const char* name : foreign_variables) unsetenv(name);
        const auto set = [](const char* name, const std::string& value) { setenv(name, value.c_str(), 1); };
        set("RANK", std::to_string(rank));
        set("LOCAL_RANK", std::to_string(rank));
        set("WORLD_SIZE", std::to_string(processes));
        set("LOCAL_WORLD_SIZE", std::to_string(processes));
        set("MASTER_ADDR", "localhost");
        set("MASTER_PORT", std::to_string(door.port()));
        set(launcher_variable, std::to_string(launcher));
        // A duplicate stays open when the program starts.
        if (rank == 0) set(listener_variable, std::to_string(dup(door.socket().file())));
        execv(program_file().c_str(), argv_);
        write_error(fmt::format("error: cannot start {}: {}\n", argv_[0], std::strerror(errno)));
        _exit(1);
    }

    // Takes the status of ranks that have ended. A rank that was killed may be seen together with others that
    // ended with an error because of it. Its status is the largest.
    void take_status() {
        const bool had_failed = failed_at_.has_value();
        for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
            const int status = ranks_[rank].ended().value_or(0);
            has_reported_ = has_reported_ || (status > 0 && status < 128);
            if (status == 0 || had_failed) continue;
            if (status > status_) failed_rank_ = rank;
            status_ = std::max(status_, status);
            failed_at_ = Clock::now();
        }
    }

    // The ranks that still run cannot end.
    void give_up() {
        name_killed_rank(
            fmt::format("; other ranks still ran {} seconds later and are killed", time_to_report.count()));
        has_given_up_ = true;
        kill_all();
    }

    // If no rank has said what happened, this process names the rank that was killed.
    void name_killed_rank(std::string_view consequence) const {
        if (has_reported_ || has_given_up_ || killed_by_ || status_ <= 128) return;
        write_error(fmt::format("{}error: rank {} was ended by signal {} ({}){}\n", line_start(STDERR_FILENO),
                                failed_rank_, status_ - 128, strsignal(status_ - 128), consequence));
    }

    int count_running() const {
        int count = 0;
        for (const Process& rank : ranks_) count += rank.runs() ? 1 : 0;
        return count;
    }
    void signal_all(int number) {
        for (const Process& rank : ranks_) rank.signal(number);
    }
    void kill_all() { signal_all(SIGKILL); }

    void receive_signals() {
        signalfd_siginfo signal{};
        while (read(signals_.file(), &signal, sizeof signal) == sizeof signal) {
            const int number = static_cast<int>(signal.ssi_signo);
            if (number == SIGTSTP) {
                pause();
            } else if (!asked_at_) {
                asked_at_ = Clock::now();
                signal_all(SIGUSR1);
            } else if (Clock::now() - *asked_at_ > same_request) {
                killed_by_ = number;
                kill_all();
            }
        }
    }

    // Stops the ranks and the launcher until the shell continues the launcher (`fg`).
    void pause() {
        signal_all(SIGSTOP);
        kill(getpid(), SIGSTOP);  // returns when the shell continues it
        signal_all(SIGCONT);
    }

    char** argv_;
    sigset_t mask_before_{};
    Socket signals_;
    std::vector<Process> ranks_;
    int status_ = 0;
    std::size_t failed_rank_ = 0;  // whose status it is
    bool has_reported_ = false;    // a rank has ended with an error, which it has printed
    bool has_given_up_ = false;
    std::optional<Clock::time_point> failed_at_, asked_at_;
    std::optional<int> killed_by_;
};

// Takes the option and its value out of the arguments, and returns the value; empty without the option. If it
// is given several times, the last one counts.
std::optional<std::string_view> take_processes(int& argc, char** argv) {
    const std::string option = fmt::format("--{}", processes_option);
    std::optional<std::string_view> given;
    int kept = std::min(argc, 1);
    for (int i = kept; i < argc; ++i) {
        const std::string_view word = argv[i];
        if (word == option) {
            given = i + 1 < argc ? argv[++i] : "";
        } else if (word.starts_with(option + "=")) {
            given = word.substr(option.size() + 1);
        } else {
            argv[kept++] = argv[i];
        }
    }
    argv[argc = kept] = nullptr;
    return given;
}

}  // namespace

std::optional<int> launch_processes(int& argc, char** argv) {
    fill_standard_streams();
    const auto given = take_processes(argc, argv);
    if (!given) return std::nullopt;
    try {
        const auto processes = whole_number<int>(*given);
        if (given->empty())
            user_error("--{} needs a number of processes, from 1 to {}", processes_option, most_processes);
        if (!processes || *processes < 1 || *processes > most_processes) {
            user_error("--{} '{}' is not a number of processes from 1 to {}", processes_option,
                       one_line(*given), most_processes);
        }
        const Start start = how_started([](const char* name) { return std::getenv(name); }, has_mpi());
        if (start.by != Start::By::itself) {
            user_error("--{} {}: this process is already one of a job ({}); leave the option out",
                       processes_option, *processes,
                       start.by == Start::By::mpi ? "of mpirun" : "RANK and WORLD_SIZE are set");
        }
        if (*processes == 1) return std::nullopt;
        // The processes inherit the limit of this one, which itself needs fewer files than each of them.
        allow_connections_to_all(*processes);
        return LocalJob(argv).run(*processes);
    } catch (const UserError& fault) {
        write_error(fmt::format("error: {}\n", fault.what()));
        return 1;
    }
}

void accept_stop_signals() {
    if (std::getenv(launcher_variable) == nullptr) return;
    sigset_t set{};
    sigemptyset(&set);
    for (const int number : stop_signals) sigaddset(&set, number);
    pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
}

}  // namespace llmc
