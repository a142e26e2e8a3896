//! What the Node's status should say about how many units counted pods can have.

use std::time::Duration;

use crate::offers::Health;
use crate::pool::{Pool, Standing, Transition};
use crate::settings::Face;

impl Pool {
    /// The count that schedulers should read. Never below what is held and what is on its way, but where no counted pod
    /// may come in the place of another that ends: to a daemon that gives nothing out, since a refusal is final, and
    /// beyond mode and limit, since a queue of pods that wait would fill every place the moment that it is free.
    pub(crate) fn count(&self) -> u32 {
        if self.standing != Standing::Serving {
            return 0;
        }
        let offered = self.offered_count();
        let wanted = if self.counted_in_flight() == 0 {
            offered.min(self.most_counted())
        } else {
            offered
        };
        self.seen.motion.leaving.unwrap_or(wanted).min(wanted)
    }

    /// How many counted pods' units the admin allows.
    fn most_counted(&self) -> u32 {
        if self.settings.mode.opens(Face::Legacy) {
            let showable = u32::try_from(self.showable(Face::Legacy)).unwrap_or(u32::MAX);
            self.settings
                .limits
                .legacy
                .unwrap_or(u32::MAX)
                .min(showable)
        } else {
            0
        }
    }

    /// Healthy ids without those that are about to be withdrawn.
    fn offered_count(&self) -> u32 {
        let offers = self.counted_offers();
        let healthy = offers
            .iter()
            .filter(|offer| offer.health == Health::Healthy);
        let withdrawn = |unit| self.side_of(unit).is_some_and(|side| !side.is_counted());
        let all = healthy.clone().count();
        let counted = healthy
            .filter(|offer| self.ledger.carrier_of(&offer.id).is_some() || !withdrawn(&offer.unit))
            .count();
        u32::try_from(counted.max(self.needed().min(all))).unwrap_or(u32::MAX)
    }

    /// What counted pods hold, and what those in flight ask for.
    fn needed(&self) -> usize {
        self.held_through(Face::Legacy).saturating_add(self.due())
    }

    /// Whether a daemon that was told to stop may do so: no counted pod comes any more, and none is on its way. At
    /// once where the count can't be lowered, since waiting brings nothing then.
    pub(crate) fn is_clear(&self, now: Duration) -> bool {
        let motion = &self.seen.motion;
        let settled = |since| now.saturating_sub(since) >= self.settings.pace.settle;
        let is_over = !motion.is_node_shown() || motion.clear_since.is_some_and(settled);
        motion.leaving.is_some() && is_over
    }
}

impl Transition {
    /// The daemon is about to stop. The kubelet fails counted pods while nobody serves its calls, so the count goes
    /// down and never up again: to what is held and in flight, which lets the kubelet admit who is on its way, and to
    /// 0 as soon as nobody is. [`Offers::clear`](crate::Offers::clear) tells when that has done its work.
    pub fn leave(&mut self) {
        let count = self.pool.count();
        self.pool.seen.motion.leaving.get_or_insert(count);
        self.settle();
        if self.pool.standing != Standing::Serving {
            self.pool.seen.motion.clear = true;
        }
    }

    /// Lowers the count of a daemon that is about to stop, and notes since when nobody comes.
    pub(crate) fn watch_the_way_out(&mut self) {
        let Some(count) = self.pool.seen.motion.leaving else {
            return;
        };
        let nobody = self.pool.counted_in_flight() == 0;
        let needed = if nobody { 0 } else { self.pool.needed() };
        let count = count.min(u32::try_from(needed).unwrap_or(u32::MAX));
        let now = self.now.uptime;
        let motion = &mut self.pool.seen.motion;
        motion.leaving = Some(count);
        let is_clear = nobody && motion.shows_at_most(count);
        motion.clear_since = is_clear.then(|| motion.clear_since.unwrap_or(now));
        self.pool.seen.motion.clear = self.pool.is_clear(now);
    }
}
