//! The retry budget keeps its share in every stretch of any run.

use tidegate_core::{Budget, BudgetSpec};
use tidegate_testkit::property;
use tidegate_testkit::random::case_count;

/// Simple rules: every prefix contains at most `min + ratio · first tries` retries, every stretch at most `reserve +
/// ratio · first tries`. A retry is refused only if nothing is left.
#[test]
fn retries_stay_within_the_budget() {
    property::check(case_count(500, 20_000), 500, |mut random| {
        let spec = BudgetSpec {
            ratio: random.pick(&[0, 1, 200, 333, 999, 1_000]),
            min: random.below(6) as u32,
            reserve: random.below(12) as u32,
        };
        let budget = Budget::new(spec);
        let ratio = u64::from(spec.ratio);
        let most = u64::from(spec.reserve.max(spec.min)) * 1_000;
        // The earned minus the spent amount after each step, in thousandths of a retry.
        let mut balances: Vec<i64> = vec![0];
        let mut held = u64::from(spec.min) * 1_000;
        let mut out = 0;
        while !random.is_exhausted() {
            let moved = match random.below(5) {
                0 => {
                    let had = held >= 1_000;
                    if budget.take() != had {
                        return Err(format!("{held} thousandths held, and a retry was {had}ly refused or let"));
                    }
                    if had {
                        out += 1;
                        -1_000
                    } else {
                        0
                    }
                }
                1 if out > 0 => {
                    budget.give_back();
                    out -= 1;
                    1_000
                }
                _ => {
                    budget.record_first_try();
                    ratio as i64
                }
            };
            held = held.saturating_add_signed(moved).min(most);
            let balance = balances[balances.len() - 1] + moved;
            if balance < -i64::from(spec.min) * 1_000 {
                return Err(format!("{balance} from the start with {spec:?}"));
            }
            if balances.iter().any(|before| balance - before < -(most as i64)) {
                return Err(format!("a stretch of more than the reserve with {spec:?}"));
            }
            balances.push(balance);
            if budget.remaining() != held / 1_000 {
                return Err(format!("{} left of {held} thousandths", budget.remaining()));
            }
        }
        Ok(())
    });
}
