// The wires of a lab with DMA cards: what lies in memory that all ranks of all hosts map, and the rules of the wire.
//
// Every host has one card, with as much room out as in. A message is a send and a receive that have met; its bytes are
// really copied, by the receiving rank, straight from the sender's memory, as they come off the modelled wire. Messages
// between one pair of endpoints go one after the other; pairs share the cards fairly (max-min). Ranks that are late do
// not slow the wire down: what it does is worked out from the clock, by whoever looks next.
#pragma once
#include <atomic>
#include <cstdint>
#include <pthread.h>
#include <sys/types.h>
#include <vector>

namespace weft {

constexpr uint32_t kMaxHosts = 256, kMaxProcesses = 512, kMaxEndpoints = 1 << 15, kMaxFlows = 1 << 13;
constexpr uint32_t kMaxPosts = 2048;  // sends to a process, and its receives, that nobody has waited for
constexpr uint32_t kNobody = ~0u;

enum PostKind : uint32_t { kSend, kReceive };

// kQueued: has met its counterpart, behind an earlier message of the pair. kFlowing: on the wire. kWired: across, and
// there when its latency is over and the last bytes are copied.
enum PostState : uint32_t { kFree, kPosted, kQueued, kFlowing, kWired, kDone, kFailed };

enum class Fault : uint32_t { kNone, kClosed, kGaveUp, kDied, kSizes, kUnreadable, kOwnGaveUp, kFull, kTimeout, kSignal };

struct alignas(128) Post {
  std::atomic<uint32_t> state;  // a futex
  Fault fault;
  uint32_t source, target;  // endpoints; source of a receive from anybody is kNobody until they meet
  uint32_t other;           // the counterpart's place in the same inbox
  uint32_t copying;         // the receiver's card reads or writes its memory just now
  uint32_t generation;      // of this place, so that old handles are told apart
  uint32_t process;         // that posted it
  int64_t tag;
  uint64_t number;  // posts are numbered as they come
  uint64_t address, bytes;
  // Of a receive that has met its send:
  double moved;  // bytes that have come off the wire
  double rate;   // bytes a nanosecond
  double due;    // of kWired: when it is there
  uint64_t copied;
};

// What is addressed to one process, and what it waits for.
struct Inbox {
  uint64_t used[2][kMaxPosts / 64];
  Post posts[2][kMaxPosts];
};

enum EndpointState : uint32_t { kUnused, kOpen, kClosed, kBroken, kDead };

struct Endpoint {
  EndpointState state;
  uint32_t process;
};

struct Process {
  pid_t pid;
  uint32_t host;
  uint32_t is_dead;
  std::atomic<uint32_t> bell;  // a futex: its card has something to do sooner than it thought
  double wakes;                // when its card looks again; -inf while it is awake
};

struct Flow {
  uint32_t process, place;  // of the receive
};

// In shared memory. All members but `bell` and `state` are read and written under the mutex only.
struct Wire {
  uint64_t magic;
  pthread_mutex_t mutex;
  int64_t epoch_ns;   // times are nanoseconds since then
  double latency;     // nanoseconds
  double rate;        // bytes a nanosecond of every card, each way
  uint64_t chunk;     // bytes that are copied at once, about
  uint64_t staging;   // bytes of each process for messages whose memory others may not read; 0: they may
  uint32_t hosts, processes, endpoints, flows;
  uint64_t numbers;
  double now;  // up to which the flows are worked out
  uint64_t carried[2 * kMaxHosts];  // bytes of each card, out and in
  Process process[kMaxProcesses];
  Endpoint endpoint[kMaxEndpoints];
  Flow flow[kMaxFlows];
  Inbox inbox[kMaxProcesses];

  static size_t bytes(uint64_t staging, uint32_t processes);
  void start(uint32_t hosts, double rate, double latency_ns, uint64_t chunk, uint64_t staging);
  double clock() const;

  Post& post(PostKind kind, uint32_t process, uint32_t place) { return inbox[process].posts[kind][place]; }
  Post& receive(const Flow& f) { return post(kReceive, f.process, f.place); }
  Post& send_of(uint32_t process, const Post& receive) { return post(kSend, process, receive.other); }
  uint32_t host_of(uint32_t endpoint_) const { return process[endpoint[endpoint_].process].host; }
};

// The wire while it is held: one thread of one process at a time. Bells ring when it is let go.
class HeldWire {
 public:
  explicit HeldWire(Wire& wire);
  ~HeldWire() { let_go(); }
  HeldWire(const HeldWire&) = delete;

  void let_go();
  void take();

  // A place for a post of `process`'s inbox; kNobody when there is none.
  uint32_t place(PostKind kind, uint32_t process);
  // Finds the counterpart of a new post, and puts the message on the wire.
  void meet(PostKind kind, uint32_t process, uint32_t place);
  // Works out what the wire has done until now.
  void advance();
  // All of a receive's bytes are copied: both sides are done.
  void finish(uint32_t process, uint32_t place);
  // Ends a post and its counterpart, unless they are over.
  void fail(PostKind kind, uint32_t process, uint32_t place, Fault fault, Fault counterpart);
  void release(PostKind kind, uint32_t process, uint32_t place);
  // Ends everything that an endpoint has under way; `own` is what its own posts get.
  void end(uint32_t endpoint, EndpointState state, Fault own, Fault peers);
  void bury(uint32_t process);  // it is dead
  // When the next bytes of a flow, or all of a wired one, are there.
  double due(const Post& receive) const;

 private:
  void flow_on(uint32_t process, uint32_t place);
  void wired(uint32_t flow);
  void next_of_pair(uint32_t process, uint32_t source, uint32_t target);
  void share_rates();
  void ring_whom_it_concerns();
  void drop_flow(uint32_t process, uint32_t place);
  void settle(Post& post, PostState state, Fault fault);
  void repair();

  Wire& wire_;
  bool is_held_ = false;
  std::vector<uint32_t> rings_;
};

template <typename F>
void each_used(const Inbox& inbox, PostKind kind, F&& visit) {
  for (uint32_t word = 0; word < kMaxPosts / 64; ++word)
    for (uint64_t bits = inbox.used[kind][word]; bits; bits &= bits - 1) visit(64 * word + uint32_t(__builtin_ctzll(bits)));
}

void futex_wake(std::atomic<uint32_t>& word);
// Until the word is no longer `seen`, was woken, or `deadline_ns` (steady clock) has passed. False when a signal came.
bool futex_sleep(std::atomic<uint32_t>& word, uint32_t seen, int64_t deadline_ns);

}  // namespace weft
