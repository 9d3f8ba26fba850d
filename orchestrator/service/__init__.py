"""TODO header"""

from orchestrator.service.service import Service, start_service

__all__ = ["Service", "start_service"]
