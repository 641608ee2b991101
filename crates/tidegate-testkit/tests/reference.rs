//! Tests that the reference store passes the conformance suite, near and far, and that faulty stores don't.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use tidegate_core::{
    Batch, CountMode, Key, KeyState, Limit, LimitId, LimitKind, Limits, Op, Outcomes, Span, Time, Verb, Window,
};
use tidegate_store::{ImmediateStore, Store, StoreError, StoreResponse};
use tidegate_testkit::conformance::{Backend, ConformanceOptions, check_conformance};
use tidegate_testkit::model::Model;
use tidegate_testkit::reference::ReferenceStore;
use tidegate_testkit::{property, random};

const FEW: ConformanceOptions = ConformanceOptions { batches: 5_000, tasks: 8, calls_per_task: 200, seed: 1 };

#[test]
fn the_reference_store_conforms() {
    check_conformance(&ReferenceStore::new, &ConformanceOptions::default()).unwrap();
}

#[test]
fn encoded_states_behave_the_same() {
    check_conformance(&ReferenceStore::with_encoding, &FEW).unwrap();
}

#[test]
fn decoding_arbitrary_bytes_is_stable() {
    property::check(2_000, 40, |mut random| {
        let junk: Vec<u8> = (0..random.below(60)).map(|_| random.next_u64() as u8).collect();
        for first in [junk.as_slice(), &[&[0x10 | random.below(7) as u8], junk.as_slice()].concat()] {
            let Some(state) = KeyState::decode(first) else { continue };
            let mut again = Vec::new();
            state.encode(&mut again);
            let Some(twice) = KeyState::decode(&again) else {
                return Err(format!("{first:?} reads, and not when written again"));
            };
            let mut third = Vec::new();
            twice.encode(&mut third);
            if third != again {
                return Err(format!("{first:?}: {again:?} became {third:?}"));
            }
        }
        Ok(())
    });
    let mut bytes = Vec::new();
    KeyState::default().encode(&mut bytes);
    bytes[0] += 0x10;
    assert!(KeyState::decode(&bytes).is_none(), "a later version");
}

/// A refund of an unknown call takes from a call that has left a window, or from one that is counted ahead. In the
/// second case, the rest of that call can't be settled and frees later.
#[test]
fn a_refund_may_prevent_a_settlement() {
    let window = Window::new(3, Span::from_secs(2), 64).unwrap().with_lead(Span::from_secs(60));
    let limits = Arc::new(Limits::new(vec![Limit::new(LimitKind::Window(window))]).unwrap());
    let store = ReferenceStore::new(Arc::clone(&limits));
    let mut model = Model::new(limits);
    let at = |millis| Time::from_secs(1_800_000_000) + Span::from_millis(millis);
    let ask = |verb, cost| Batch::with_op(1, Op::new(LimitId::FIRST, verb, Key::new(1, 1), cost));
    let calls = [
        (0, ask(Verb::Debit, 4)),
        (2_000, ask(Verb::Take, 2).with_lead(Span::from_secs(60))),
        (2_500, ask(Verb::Refund, 1)),
        (2_600, ask(Verb::Settle, 2).with_counted_at(at(62_000))),
        (2_700, ask(Verb::Take, 3)),
    ];
    for (millis, batch) in calls {
        let outcomes = store.apply_now(&batch, at(millis));
        model.check(&batch, &outcomes).unwrap_or_else(|mismatch| panic!("after {millis} ms: {mismatch}"));
    }
}

/// A store that replies later and has its own clock, as one behind a network does.
struct Remote {
    near: ReferenceStore,
    clock: AtomicU64,
}

impl Remote {
    fn now(&self) -> Time {
        Time::from_secs(1_800_000_000) + Span::from_micros(self.clock.fetch_add(7, Ordering::SeqCst))
    }
}

impl Store for Remote {
    type Future = Reply;

    fn limits(&self) -> &Arc<Limits> {
        self.near.limits()
    }

    fn apply(&self, batch: &Batch, _: Time) -> StoreResponse<Reply> {
        StoreResponse::Pending(Reply { outcomes: Some(self.near.apply_now(batch, self.now())), asked: false })
    }

    fn submit(&self, batch: &Batch, _: Time) {
        self.near.submit(batch, self.now());
    }
}

/// A reply that is ready at the second poll.
struct Reply {
    outcomes: Option<Outcomes>,
    asked: bool,
}

impl Future for Reply {
    type Output = Result<Outcomes, StoreError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if !self.asked {
            self.asked = true;
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(self.outcomes.take().ok_or(StoreError::Failed("asked after the answer".into())))
    }
}

struct Far;

impl Backend for Far {
    type Store = Remote;

    fn open(&self, limits: Arc<Limits>) -> Remote {
        Remote { near: ReferenceStore::new(limits), clock: AtomicU64::new(0) }
    }

    fn set_now(&self, _: &Remote, _: Time) -> bool {
        false
    }
}

#[test]
fn a_store_behind_a_network_conforms() {
    check_conformance(
        &Far,
        &ConformanceOptions {
            batches: random::case_count(20_000, 200_000),
            tasks: 16,
            calls_per_task: 500,
            seed: random::run_seed(),
        },
    )
    .unwrap();
}

/// A fault of a store.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// A refused `Take` is tried again one operation at a time.
    Halves,
    /// A peek counts.
    Looks,
    /// A reset resets the next limit as well.
    Resets,
    /// Every hundredth batch is carried out twice.
    Doubles,
    /// Calls are never counted ahead.
    Leads,
    /// The end of a call is lost.
    Settles,
    /// The true cost of a call is lost.
    Debits,
    /// A refund takes any call.
    Refunds,
    /// A refund is of a call that was just charged.
    Belated,
    /// Every throttled reply is of the latest generation.
    Throttles,
    /// Every success is of the first generation.
    Succeeds,
    /// A credential that isn't accepted isn't disabled.
    Disables,
    /// A restored penalty is lost.
    Penalises,
}

impl Fault {
    const ALL: [Self; 13] = [
        Self::Halves,
        Self::Looks,
        Self::Resets,
        Self::Doubles,
        Self::Leads,
        Self::Settles,
        Self::Debits,
        Self::Refunds,
        Self::Belated,
        Self::Throttles,
        Self::Succeeds,
        Self::Disables,
        Self::Penalises,
    ];

    /// Returns the batch that is carried out in place of another.
    fn bend(self, batch: &Batch) -> Batch {
        let terms = batch.context();
        let lead = if let Self::Leads = self { Span::ZERO } else { terms.lead };
        let refunds = batch.ops().iter().any(|op| op.verb == Verb::Refund);
        let unknown = matches!(self, Self::Refunds) && refunds;
        let mut bent = Batch::new(terms.holder).with_lead(lead);
        bent = bent.with_counted_at(if unknown { Time::ZERO } else { terms.counted_at });
        bent = bent.with_charged_at(if let Self::Belated = self { Time::NEVER } else { terms.charged_at });
        for &op in batch.ops() {
            let bent_op = match (self, op.verb) {
                (Self::Settles, Verb::Settle)
                | (Self::Debits, Verb::Debit)
                | (Self::Disables, Verb::Disable)
                | (Self::Penalises, Verb::RestorePenalty { .. }) => {
                    // An operation that always succeeds and changes nothing.
                    Op { verb: Verb::Refund, cost: 0, ..op }
                }
                (Self::Throttles, Verb::Throttle { .. }) => Op { verb: Verb::Throttle { generation: u32::MAX }, ..op },
                (Self::Succeeds, Verb::Success { .. }) => Op { verb: Verb::Success { generation: 0 }, ..op },
                _ => op,
            };
            bent.push(bent_op).expect("as many as before");
        }
        bent
    }
}

struct Wrong {
    near: ReferenceStore,
    fault: Fault,
    batches: AtomicU64,
}

impl Store for Wrong {
    type Future = <ReferenceStore as Store>::Future;

    fn limits(&self) -> &Arc<Limits> {
        self.near.limits()
    }

    fn apply(&self, batch: &Batch, now: Time) -> StoreResponse<Self::Future> {
        let number = self.batches.fetch_add(1, Ordering::SeqCst);
        let outcomes = self.near.apply_now(&self.fault.bend(batch), now);
        let alone = |op: Op| {
            let mut batch = Batch::new(batch.holder());
            batch.push(op).expect("room for one");
            self.near.apply_now(&batch, now);
        };
        match self.fault {
            Fault::Halves if outcomes.refuses() => {
                batch.ops().iter().filter(|op| op.verb == Verb::Take).for_each(|op| alone(*op));
            }
            Fault::Looks => {
                let looks = batch.ops().iter().filter(|op| op.verb == Verb::Peek);
                looks.for_each(|op| alone(Op { verb: Verb::Take, ..*op }));
            }
            Fault::Resets => {
                for op in batch.ops().iter().filter(|op| op.verb == Verb::Reset) {
                    let next = LimitId::from_index(op.limit.index() + 1).expect("few limits");
                    alone(Op { limit: next, ..*op });
                }
            }
            Fault::Doubles if number % 100 == 99 => {
                self.near.apply_now(batch, now);
            }
            _ => {}
        }
        StoreResponse::Ready(outcomes)
    }

    fn submit(&self, batch: &Batch, now: Time) {
        self.near.submit(batch, now);
    }
}

#[test]
fn every_faulty_store_fails_conformance() {
    for fault in Fault::ALL {
        let open = |limits| Wrong { near: ReferenceStore::new(limits), fault, batches: AtomicU64::new(0) };
        let failure = check_conformance(&open, &FEW).expect_err("the fault must be found");
        assert!(failure.to_string().contains("TIDEGATE_SEED=1"), "{fault:?}: {failure}");
    }
}

#[test]
fn snapshots_show_only_significant_state() {
    let window = Window::new(2, Span::from_secs(60), 64).unwrap();
    let limit = Limit::new(LimitKind::Window(window)).with_count_mode(CountMode::Admitted);
    let store = ReferenceStore::new(Arc::new(Limits::new(vec![limit]).unwrap()));
    let mut batch = Batch::new(1);
    batch.push(Op::new(LimitId::from_index(0).unwrap(), Verb::Take, Key::new(1, 1), 1)).unwrap();
    let now = Time::from_secs(1_700_000_000);
    store.apply_now(&batch, now);
    let before = store.snapshot(now);
    assert_eq!((before.len(), store.len()), (1, 1));
    let fork = store.fork();
    fork.apply_now(&batch, now);
    assert_ne!(fork.snapshot(now), before);
    assert_eq!(store.snapshot(now), before);
    assert!(store.snapshot(now + Span::from_secs(60)).is_empty());
}
