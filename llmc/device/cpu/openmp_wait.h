// How OpenMP's threads wait for each other.
#pragma once

namespace llmc {

// GNU OpenMP's threads spin at the end of each parallel loop until the last one is there. Where the machine
// is busy with anything else, the last one may be waiting for a core on which another spins, and a step takes
// a hundred times as long. Threads that sleep cost microseconds. The library reads its setting before main(),
// so the program starts itself once more with OMP_WAIT_POLICY=passive, unless that is set already.
void let_waiting_threads_sleep(char** argv);

}  // namespace llmc
