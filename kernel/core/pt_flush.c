// SPDX-License-Identifier: GPL-2.0
/*
 * Two ways to flush the TLBs of a process on all processors.
 *
 * flush_tlb_mm_range() is what the kernel itself uses; it is not exported, but may be found
 * (pt_symbol.h).
 *
 * Where that fails, or is not wanted (parameter flush=exported), the generation of the address
 * space is advanced and every processor that runs it flushes everything: what that needs is
 * exported. A processor that does not run it compares generations before it does. Devices that share
 * the process' page tables have to be told then; where they can only be told by what is not
 * exported, and that cannot be found, the module does not load.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/mm.h>
#include <linux/mmu_notifier.h>
#include <linux/moduleparam.h>
#include <linux/smp.h>
#include <linux/static_call.h>
#include <asm/tlbflush.h>

#include "core/compat.h"
#include "core/pt_flush.h"
#include "core/pt_symbol.h"

static char *flush = "direct";
module_param(flush, charp, 0444);
MODULE_PARM_DESC(flush, "direct: the kernel's own way (default); exported: slower");

static void flush_this_processor(void *unused)
{
	preempt_disable();
	__flush_tlb_all();
	preempt_enable();
}

static void tell_no_device(struct mm_struct *mm, unsigned long start, unsigned long end)
{
}

DEFINE_STATIC_CALL(vellum_tell_devices, tell_no_device);

static void flush_exported(struct mm_struct *mm, unsigned long start, unsigned long end,
			   unsigned int stride_shift, bool freed_tables)
{
	/* Entries were cleared before; the generation must not be seen to advance before that. */
	smp_mb__before_atomic();
	atomic64_inc(&mm->context.tlb_gen);
	smp_mb__after_atomic(); /* advanced before it is seen which processors run it */
	on_each_cpu_cond_mask(NULL, flush_this_processor, NULL, true, mm_cpumask(mm));
	if (mm_has_notifiers(mm))
		static_call(vellum_tell_devices)(mm, start, end);
}

DEFINE_STATIC_CALL(vellum_flush, flush_exported);

bool pt_flush_is_direct(void)
{
	return static_call_query(vellum_flush) != (void *)flush_exported;
}

static int find_devices(void)
{
	void *function;

	if (!flush_tells_devices())
		return 0;
	function = pt_symbol_find("__mmu_notifier_arch_invalidate_secondary_tlbs");
	if (!function) {
		pr_err("devices that share page tables could not be told of flushes\n");
		return -EOPNOTSUPP;
	}
	static_call_update(vellum_tell_devices, function);
	return 0;
}

int pt_flush_init(void)
{
	void *function;

	if (!strcmp(flush, "exported"))
		return find_devices();
	if (strcmp(flush, "direct")) {
		pr_err("flush=%s: there are direct and exported\n", flush);
		return -EINVAL;
	}
	function = pt_symbol_find("flush_tlb_mm_range");
	if (!function) {
		pr_warn("flush_tlb_mm_range is not to be found; TLBs are flushed the slower way\n");
		return find_devices();
	}
	static_call_update(vellum_flush, function);
	return 0;
}

void pt_flush_range(struct mm_struct *mm, unsigned long start, unsigned long end)
{
	static_call(vellum_flush)(mm, start, end, PAGE_SHIFT, false);
}

void pt_flush_huge(struct mm_struct *mm, unsigned long start)
{
	static_call(vellum_flush)(mm, start, start + PMD_SIZE, PMD_SHIFT, false);
}

void pt_flush_all(struct mm_struct *mm)
{
	pt_flush_range(mm, 0, TLB_FLUSH_ALL);
}

void pt_flush_tables(struct mm_struct *mm, unsigned long start, unsigned long end)
{
	static_call(vellum_flush)(mm, start, end, PAGE_SHIFT, true);
}
