// How OpenMP threads wait for each other.
#pragma once

namespace llmc {

// Restarts the program with OMP_WAIT_POLICY=passive, unless a wait policy is set already. Without it, threads
// of GNU OpenMP spin at the end of each parallel loop until the last one arrives. On a busy machine the last
// one may wait for a core on which another spins; a step then takes a hundred times as long. Waking sleeping
// threads costs microseconds. The library reads its setting before main(), so a restart is needed.
void let_waiting_threads_sleep(char** argv);

}  // namespace llmc
