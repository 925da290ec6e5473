// A library that is opened when one of its functions is first called. A program that can use it starts without it too, and
// where it is there, without the time that linking it would take at each start.
#pragma once

#include <dlfcn.h>

#include <string>
#include <utility>

#include "llmc/core/error.h"

// The file of a version's library, as one literal: dev/gpu/bundle.sh finds it in a program.
#define LLMC_LIBRARY_FILE(name, version) "lib" name ".so." LLMC_TEXT_OF(version)
#define LLMC_TEXT_OF(number) #number

namespace llmc::cuda {

// What a user is told where the library, or a function of it, is missing.
struct LibraryAdvice {
    std::string needed_by;  // an option
    std::string source;     // what has the library
    std::string instead;    // what does without it
};

// Stays loaded to the end of the program.
class SharedLibrary {
  public:
    // UserError where this machine has none.
    SharedLibrary(const char* file, LibraryAdvice advice)
        : file_(file), advice_(std::move(advice)), handle_(dlopen(file, RTLD_NOW | RTLD_LOCAL)) {
        if (handle_ != nullptr) return;
        user_error(
            "{}: {} (looked for in LD_LIBRARY_PATH, where `make` found it and among the system's libraries); "
            "put the folder of {} into LD_LIBRARY_PATH ({}), or take {}",
            advice_.needed_by, dlerror(), file_, advice_.source, advice_.instead);
    }

    // The library's function of this name, for `own`, the program's, which has its type. It is looked up once.
    template <auto* own, class... Arguments>
    auto call(const char* name, Arguments... arguments) const {
        static const auto function = reinterpret_cast<decltype(own)>(find(name));
        return function(arguments...);
    }

  private:
    void* find(const char* name) const {
        void* const found = dlsym(handle_, name);
        if (found == nullptr) {
            user_error("{}: {} here is too old, it has no {}; take a newer one, or {}", advice_.needed_by,
                       file_, name, advice_.instead);
        }
        return found;
    }

    const char* file_;
    LibraryAdvice advice_;
    void* handle_;
};

}  // namespace llmc::cuda
