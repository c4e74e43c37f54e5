// SPDX-License-Identifier: GPL-2.0
/* Tells secondary MMUs by what the kernel itself uses for it, which is not exported. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/static_call.h>

#include "core/compat.h"
#include "core/pt_secondary.h"
#include "core/pt_symbol.h"

static int no_start(struct mmu_notifier_range *range)
{
	return 0;
}

DEFINE_STATIC_CALL(vellum_secondary_start, no_start);
DEFINE_STATIC_CALL(vellum_secondary_end, secondary_no_end);

static bool is_found;

void pt_secondary_init(void)
{
	void *start = pt_symbol_find("__mmu_notifier_invalidate_range_start");
	void *end = pt_symbol_find("__mmu_notifier_invalidate_range_end");

	if (!start || !end) {
		pr_warn("notifiers are not to be found: no surfaces of exmaps, and slower punches\n");
		return;
	}
	static_call_update(vellum_secondary_start, start);
	static_call_update(vellum_secondary_end, end);
	is_found = true;
}

bool pt_secondary_can_be_told(void)
{
	return is_found;
}

/* The core names an owner for this kind of event alone, and always. */
static char owner;

bool pt_secondary_is_ours(const struct mmu_notifier_range *range)
{
	return range->event == MMU_NOTIFY_EXCLUSIVE && range->owner == &owner;
}

bool pt_secondary_invalidate(struct mm_struct *mm, unsigned long start, unsigned long end)
{
	struct mmu_notifier_range range = {
		.mm = mm,
		.start = start,
		.end = end,
		.flags = MMU_NOTIFIER_RANGE_BLOCKABLE,
		.event = MMU_NOTIFY_EXCLUSIVE,
		.owner = &owner,
	};

	if (!is_found)
		return false;
	if (!mm_has_notifiers(mm))
		return true;
	might_sleep();
	static_call(vellum_secondary_start)(&range);
	secondary_end(vellum_secondary_end, &range);
	return true;
}
