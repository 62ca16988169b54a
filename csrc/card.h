// The DMA card of one rank: it posts messages on the lab's wire, and copies what comes off it.
#pragma once
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "wire.h"

namespace weft {

// A post, as its owner knows it.
struct Handle {
  uint32_t kind, process, place, generation;
  uint64_t staged;  // where its copy is, of a send whose memory others may not read; kNotStaged
};

constexpr uint64_t kNotStaged = ~uint64_t(0);

struct Outcome {
  Fault fault;
  uint32_t source;  // the endpoint that sent it
  uint64_t theirs;  // bytes of the other side, where sizes differ
};

// Maps the wire and takes part in it. Two threads: one sleeps until bytes are due and copies them, the other until a peer
// dies. Neither knows Python. A child that was forked has neither, and may not use its parent's card.
class Card {
 public:
  Card(int fd, uint32_t host);
  ~Card();
  Card(const Card&) = delete;

  uint32_t open();                          // a new endpoint
  void watch(const std::vector<uint32_t>&);  // the processes of these endpoints: what waits for one that dies ends
  uint32_t host_of(uint32_t endpoint);
  std::pair<uint64_t, uint64_t> carried();  // bytes that have left this host, and that have come
  void close(uint32_t endpoint);     // peers that wait for it hear that it is closed
  void give_up(uint32_t endpoint);   // all that is under way on it fails, here and at its peers

  Handle send(uint32_t from, uint32_t to, int64_t tag, uint64_t address, uint64_t bytes);
  Handle receive(uint32_t from, uint32_t to, int64_t tag, uint64_t address, uint64_t bytes);  // from kNobody: anybody

  bool is_over(const Handle&);
  // Waits; kTimeout and kSignal leave the post as it is, after anything else the handle is gone.
  Outcome wait(const Handle&, int64_t deadline_ns);

  bool reads_memory() const { return wire_->staging == 0; }

 private:
  Handle post(PostKind, uint32_t from, uint32_t to, int64_t tag, uint64_t address, uint64_t bytes);
  void check_process() const;
  void serve();
  void guard();
  bool next_copy(HeldWire&, uint32_t* place, double* wakes);
  void copy(HeldWire&, uint32_t place);
  Fault read(const Post& send, const Post& receive, uint64_t bytes) const;
  uint64_t stage(uint64_t address, uint64_t bytes);
  void unstage(uint64_t at);
  char* staging_of(uint32_t process) const;

  Wire* wire_;
  size_t bytes_;
  uint32_t me_;
  pid_t pid_;
  int deaths_;  // an eventfd that wakes `guard`
  std::atomic<bool> is_over_{false};
  std::mutex watched_mutex_, staging_mutex_;
  std::map<uint32_t, int> watched_;        // a pidfd for each process
  std::map<uint64_t, uint64_t> staged_;    // where: how many bytes
  std::thread server_, guard_;
};

// Makes the memory behind `fd`, which has `Wire::bytes`, a wire.
void make_wire(int fd, uint32_t hosts, double bytes_per_second, double latency_seconds, uint64_t chunk, uint64_t staging,
               uint32_t processes);
// Whether this process may read the memory of `pid`, at `address`; else why not.
std::string why_unreadable(pid_t pid, uint64_t address);

}  // namespace weft
