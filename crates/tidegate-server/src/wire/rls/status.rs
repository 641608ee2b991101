//! The status of a descriptor.

use tidegate::Decision;
use tidegate::policy::Plan;
use tidegate_core::Span;
use tidegate_policy::Quantity;
use tidegate_policy::calendar::PeriodUnit;

use super::messages::{Code, CurrentLimit, DescriptorStatus, Seconds, Unit};

impl DescriptorStatus {
    /// The status of a descriptor without a limit.
    pub(super) fn admitted() -> Self {
        Self { code: Code::Ok.into(), ..Self::default() }
    }

    /// The status of a descriptor that can't be counted. After an error instead, Envoy would let the client's request pass
    /// by default.
    pub(super) fn refused() -> Self {
        Self { code: Code::OverLimit.into(), ..Self::default() }
    }
}

/// Refusals are stricter than admissions: those that no wait ends, then by their waits. Then comes the smallest remaining
/// amount.
pub(crate) fn strictness(decision: &Decision) -> (bool, Option<Span>, std::cmp::Reverse<u64>) {
    let wait = (!decision.allowed).then(|| decision.retry_after.unwrap_or(Span::MAX));
    (!decision.allowed, wait, std::cmp::Reverse(decision.remaining.unwrap_or(u64::MAX)))
}

/// The status of a descriptor. A limit of the files has the name that they give it, if any (`Some`); others have that in the
/// policy.
pub(super) fn descriptor_status(plan: &Plan, decision: &Decision, name: Option<&str>) -> DescriptorStatus {
    let small = |amount: u64| u32::try_from(amount).unwrap_or(u32::MAX);
    let current_limit = decision.bound_by.zip(decision.limit).map(|(id, limit)| {
        let info = plan.limit_info(id);
        let unit = match info.quantity() {
            Quantity::Quota { unit: PeriodUnit::Month, .. } => Unit::Month,
            Quantity::Quota { unit: PeriodUnit::Year, .. } => Unit::Year,
            _ => info.rate_limit_policy().window.map_or(Unit::Unknown, unit_of),
        };
        CurrentLimit {
            requests_per_unit: small(limit),
            unit: unit.into(),
            name: name.unwrap_or(info.name()).to_owned(),
        }
    });
    // A call that never has room may come again with fewer hits once the window is over.
    let window = decision.bound_by.and_then(|id| plan.limit_info(id).rate_limit_policy().window);
    let never = || window.map(Span::from_secs);
    let reset = if decision.allowed { Some(decision.reset_after) } else { decision.retry_after.or_else(never) };
    DescriptorStatus {
        code: if decision.allowed { Code::Ok } else { Code::OverLimit }.into(),
        current_limit,
        limit_remaining: if decision.allowed { decision.remaining.map_or(u32::MAX, small) } else { 0 },
        // Envoy ignores fractions, and no wait may be told too short.
        duration_until_reset: reset.map(|wait| Seconds { seconds: wait.as_secs_ceil().cast_signed() }),
    }
}

/// The unit of a window in seconds: months have 30 days, years 365.
fn unit_of(seconds: u64) -> Unit {
    match seconds {
        1 => Unit::Second,
        60 => Unit::Minute,
        3600 => Unit::Hour,
        86_400 => Unit::Day,
        604_800 => Unit::Week,
        2_592_000 => Unit::Month,
        31_536_000 => Unit::Year,
        _ => Unit::Unknown,
    }
}
