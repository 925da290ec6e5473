// A library that is opened when one of its functions is first called. The program starts without it, and does
// not spend the time at each start that linking it would take.
#pragma once

#include <dlfcn.h>

#include <string>
#include <utility>

#include "llmc/core/error.h"

// The file name of a library with its version. It is one string literal, because dev/gpu/bundle.sh searches
// the program's file for it.
#define LLMC_LIBRARY_FILE(name, version) "lib" name ".so." LLMC_TEXT_OF(version)
#define LLMC_TEXT_OF(number) #number

namespace llmc::cuda {

// The parts of the error message for a missing library or function.
struct LibraryAdvice {
    std::string needed_by;  // the option that needs it
    std::string source;     // who provides the library
    std::string instead;    // the option that works without it
};

// A library that stays loaded until the program ends.
class SharedLibrary {
  public:
    // Throws a UserError if this machine does not have the library.
    SharedLibrary(const char* file, LibraryAdvice advice)
        : file_(file), advice_(std::move(advice)), handle_(dlopen(file, RTLD_NOW | RTLD_LOCAL)) {
        if (handle_ != nullptr) return;
        user_error(
            "{}: {} (searched in LD_LIBRARY_PATH, where `make` found it, and in the system's libraries); add "
            "the directory of {} to LD_LIBRARY_PATH ({}), or use {}",
            advice_.needed_by, dlerror(), file_, advice_.source, advice_.instead);
    }

    // Calls the library's function of this name. `own` is the program's function of the same type. The name
    // is looked up once.
    template <auto* own, class... Arguments>
    auto call(const char* name, Arguments... arguments) const {
        static const auto function = reinterpret_cast<decltype(own)>(find(name));
        return function(arguments...);
    }

  private:
    void* find(const char* name) const {
        void* const found = dlsym(handle_, name);
        if (found == nullptr) {
            user_error("{}: {} is too old: it has no {}; install a newer version, or use {}",
                       advice_.needed_by, file_, name, advice_.instead);
        }
        return found;
    }

    const char* file_;
    LibraryAdvice advice_;
    void* handle_;
};

}  // namespace llmc::cuda
